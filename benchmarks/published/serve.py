"""Start vLLM's engine with the arguments of ``vllm serve``, as its server does, and end it."""

from __future__ import annotations

import sys

STARTED = "the engine has started"


def main() -> None:
    """Start the engine; say so when it is ready for requests."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
    # A server batches other numbers of tokens and requests by default than vllm.LLM does.
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    print(STARTED, flush=True)
    del engine


if __name__ == "__main__":
    main()
