"""Peaks that others published of real GPUs, beside the virtual GPU's: one family of rows.

    python -m benchmarks.published FAMILY [--python [VERSION=]PATH ...] [--source [NAME=]PATH ...]

data/README.md names the sources of the rows; each family's module describes its interpreter and its
sources at the top. A result is written to results/ only if it has all rows of the family.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

from benchmarks.harness import publish
from benchmarks.published import runner

FAMILIES = ("runs", "fsdp", "smp", "segmentary", "vae")
FAMILIES += ("detection", "speech", "diffusion", "inference", "nanogpt", "speedups", "titan", "sft")
FAMILIES += ("servers", "megatron", "loading", "prime")


def main() -> None:
    """Run a family's rows, or, in a worker, the rows of one process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--python", action="append", default=[], metavar="[VERSION=]PATH")
    parser.add_argument("--source", action="append", default=[], metavar="[NAME=]PATH")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--seen", action="store_true", help="no rows that nobody had looked at")
    parser.add_argument("--keep", help="a file of answers: processes in it do not run again")
    parser.add_argument("--kept", action="store_true", help="run nothing that it does not have")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        runner.work(options.family, options.worker)
        return
    family = import_module(f"benchmarks.published.{options.family}")
    text = family.main(options) if hasattr(family, "main") else runner.run(family, options)
    name = "published" if options.family == "runs" else f"published_{options.family}"
    publish(name, text, keep=not (options.only or options.seen or options.dry))


if __name__ == "__main__":
    main()
