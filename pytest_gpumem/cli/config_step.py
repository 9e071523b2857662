"""Run one step of a causal language model of transformers, from its configuration alone.

``gpumem model`` runs this program. It creates the model with empty weights on the GPU. Then it
trains the model for two steps, or generates tokens after a prompt, with a KV cache.
"""

from __future__ import annotations

import argparse
import inspect
from importlib import import_module
from typing import Any, Final

DTYPES: Final = ("bfloat16", "float16", "float32")
OPTIMIZERS: Final = ("AdamW", "Adafactor", "SGD")


def add_step_arguments(parser: Any) -> None:  # noqa: ANN401 - argparse's parser, or its group
    """Add the arguments that describe the step."""
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    parser.add_argument(
        "--length", type=int, default=1024, metavar="N", help="tokens of each sequence (1024)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (bfloat16)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=8, metavar="N", help="tokens that inference writes (8)"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="of torch.optim (AdamW)"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of peft alone")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute activations of layers again"
    )


def new_model(options: argparse.Namespace) -> Any:  # noqa: ANN401 - transformers may be missing
    """Create the model on the GPU; with FSDP2, only this rank's shards."""
    import torch
    from torch.distributed.fsdp import fully_shard

    transformers: Any = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(options.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype)
        )
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=len, default=())  # the decoder's layers: the longest list
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        peft: Any = import_module("peft")
        adapters = peft.LoraConfig(r=options.lora, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    if options.fsdp:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cuda")
        model.tie_weights()
    else:
        make_empty(model)
    return model


def make_empty(model: Any) -> None:  # noqa: ANN401 - as above
    """Move a model from the meta device to the GPU, with empty weights.

    ``to_empty`` makes a tensor for each module that shares a weight, such as an embedding and the
    head. A loaded model has one shared tensor, so the weights are tied again.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    first: dict[Any, str] = {}
    for name, parameter in named:
        first.setdefault(parameter, name)
    shared = [(name, first[parameter]) for name, parameter in named if first[parameter] != name]
    places = {name: (name.rpartition(".")[0], name.rpartition(".")[2]) for name, _ in shared}
    for path, attribute in places.values():
        model.get_submodule(path).register_parameter(attribute, None)
    model.to_empty(device="cuda")
    for name, original in shared:
        path, attribute = places[name]
        model.get_submodule(path).register_parameter(attribute, model.get_parameter(original))


def train_two_steps(model: Any, options: argparse.Namespace) -> None:  # noqa: ANN401 - as above
    """Train for two steps: the optimizer allocates its state at the end of the first."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, options.optimizer)(trained)
    tokens = torch.zeros(options.batch, options.length, dtype=torch.long, device="cuda")
    model.train()
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_tokens(model: Any, options: argparse.Namespace) -> None:  # noqa: ANN401 - as above
    """Generate tokens after a prompt, with a KV cache."""
    import torch

    tokens = torch.zeros(options.batch, options.length, dtype=torch.long, device="cuda")
    known = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}  # as generate() does
    model.eval()
    with torch.inference_mode():
        output = model(input_ids=tokens, use_cache=True, **last)
        for _ in range(options.new_tokens - 1):
            cache = output.past_key_values
            output = model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True, **last)


def main() -> None:
    """Run the step that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    add_step_arguments(parser)
    options = parser.parse_args()
    if options.fsdp:
        import torch

        torch.distributed.init_process_group("nccl")
    model = new_model(options)
    (write_tokens if options.inference else train_two_steps)(model, options)


if __name__ == "__main__":
    main()
