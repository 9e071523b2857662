"""``gpumem light``: list the requirements of an environment without NVIDIA's packages.

It needs only Python and pip, so it runs where this package is installed without its own
requirements (``pip install --no-deps pytest-gpumem``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

HELP: Final = "print the requirements of an environment without NVIDIA's packages, for pip or uv"
DESCRIPTION: Final = (
    f"{HELP[0].upper()}{HELP[1:]}. The virtual GPU needs none of these packages; it needs Triton "
    "only for torch.compile. Usage: gpumem light torch transformers > light.txt && pip "
    "install --no-deps --no-compile -r light.txt"
)
OWN: Final = "pytest-gpumem"
OWN_REQUIREMENT: Final = re.compile(r"pytest[-_.]gpumem(?:\[([\w\s,-]*)\])?", re.IGNORECASE)
"""a requirement for this package: its version is ignored, as the installed one is used"""
FIRST_PIP: Final = 25, 3
"""the first pip whose --dry-run resolves requirements without downloading whole packages"""
UNUSED: Final = re.compile(r"(nvidia|cuda)-.*|(pytorch-)?triton")
"""normalized names of packages that the virtual GPU does not need; torch.compile needs Triton"""
CUDNN: Final = re.compile(r"nvidia-cudnn-cu\d+")
TRITON: Final = re.compile(r"(pytorch-)?triton")
KEPT: Final = {"nvidia-ml-py"}
"""kept although UNUSED matches it: pure Python, 50 kB; lists the processes on a real GPU"""
# Packages for CUDA 12 and for CUDA 13; a build of torch requires those for one version only.
EXCLUDED_BY_UV: Final = (
    *("cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "nvidia-cublas", "nvidia-cublas-cu12"),
    *("nvidia-cuda-cccl", "nvidia-cuda-cupti", "nvidia-cuda-cupti-cu12", "nvidia-cuda-nvrtc"),
    *("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufft-cu12"),
    *("nvidia-cufile", "nvidia-cufile-cu12", "nvidia-curand", "nvidia-curand-cu12"),
    *("nvidia-cusolver", "nvidia-cusolver-cu12", "nvidia-cusparse", "nvidia-cusparse-cu12"),
    *("nvidia-cusparselt-cu12", "nvidia-cusparselt-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-nvjitlink", "nvidia-nvjitlink-cu12", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
    *("nvidia-nvtx", "nvidia-nvtx-cu12", "triton"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "requirements",
        nargs="*",
        metavar="REQUIREMENT",
        help="packages that the tests need, as for pip: transformers, torch==2.15.0",
    )
    for short, name, file in (
        ("-r", "--requirement", "requirements"),
        ("-c", "--constraint", "constraints"),
    ):
        parser.add_argument(
            short, name, action="append", default=[], metavar="FILE", help=f"a file of {file}"
        )
    parser.add_argument(
        "--cudnn",
        action="store_true",
        help="keep cuDNN (0.9 GB): cuDNN itself then gives the workspaces of convolutions and "
        "attention",
    )
    parser.add_argument(
        "--triton", action="store_true", help="keep Triton (1 GB), which torch.compile needs"
    )
    parser.add_argument(
        "--excludes",
        action="store_true",
        help="print the names of the packages that are left out, for: uv pip install --excludes",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Return a requirements file, or the names of the packages that it leaves out."""
    patterns = [*[CUDNN] * arguments.cudnn, *[TRITON] * arguments.triton]
    if arguments.excludes:
        return Outcome("\n".join(name for name in EXCLUDED_BY_UV if is_left_out(name, patterns)))
    extras: list[str] = []
    foreign = []
    for requirement in arguments.requirements:
        own = OWN_REQUIREMENT.fullmatch(requirement)
        if own is None:
            foreign.append(requirement)
        else:
            extras += re.findall(r"[\w-]+", own[1] or "")
    words = [
        *own_requirements(extras),
        *foreign,
        *(word for file in arguments.requirement for word in ("-r", file)),
        *(word for file in arguments.constraint for word in ("-c", file)),
    ]
    packages = [item["metadata"] for item in resolved(words)]
    lines = sorted(
        f"{package['name']}=={package['version']}"
        for package in packages
        if normalized(package["name"]) != OWN and not is_left_out(package["name"], patterns)
    )
    left_out = sorted(
        package["name"] for package in packages if is_left_out(package["name"], patterns)
    )
    comments = [
        "# pip install --no-deps --no-compile -r FILE",
        f"# left out: {', '.join(left_out) or 'nothing'}",
        "# pip check reports these packages as missing; the virtual GPU needs none of them",
    ]
    return Outcome("\n".join([*comments, *lines]))


def own_requirements(extras: Sequence[str] = ()) -> list[str]:
    """Read this package's requirements, with some extras, from its installed metadata."""
    try:
        declared = requires(OWN) or []
    except PackageNotFoundError:
        raise SpecError(
            OWN, "this is not installed as a package", f"pip install --no-deps {OWN}, and try again"
        ) from None
    requirements = []
    for requirement in declared:
        needed, _, marker = requirement.partition(";")
        if not marker or any(f'"{extra}"' in marker for extra in extras):
            requirements.append(needed.strip())
    return requirements


def resolved(requirements: Sequence[str]) -> list[dict[str, Any]]:
    """Let pip resolve requirements without installing anything.

    An older pip would download NVIDIA's packages (3 GB), so a newer one is fetched from the index
    for this one run.

    Returns:
        the "install" entries of pip's "Installation Report" (see pip's documentation).
    """
    if PathFinder.find_spec("pip") is None:  # avoids setuptools' finder, which warns
        raise SpecError(
            "gpumem light",
            f"{sys.executable} has no pip, which chooses the versions",
            "with uv: gpumem light --excludes > excludes.txt && "
            "uv pip install --excludes excludes.txt ...",
        )
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    with tempfile.TemporaryDirectory(prefix="pytest-gpumem-") as folder:
        pip, is_recent = recent_pip(folder)
        if is_recent:
            # If an index does not serve metadata separately, pip then downloads only the metadata
            # from a wheel. It warns that this is experimental.
            options.append("--use-feature=fast-deps")
        process = subprocess.run(
            [*pip, "install", *options, *requirements], capture_output=True, text=True, check=False
        )
    if process.returncode != 0:
        print(process.stderr, file=sys.stderr, end="")
        problem = f"pip cannot install these together (exit status {process.returncode}, see above)"
        remedy = "change the requirements"
        raise SpecError(f"gpumem light {' '.join(requirements)}", problem, remedy)
    rows: list[dict[str, Any]] = json.loads(process.stdout)["install"]
    return rows


def recent_pip(folder: str) -> tuple[list[str], bool]:
    """Return a pip command, and whether its --dry-run downloads no packages.

    If the installed pip is older, a newer one is put into ``folder``, which is empty.
    """
    own = [sys.executable, "-m", "pip"]
    if tuple(int(part) for part in re.findall(r"\d+", version("pip"))[:2]) >= FIRST_PIP:
        return own, True
    # --no-compile: the newer pip runs once, so most of its bytecode would never be used.
    newer = ["install", "--quiet", "--no-deps", "--no-compile", "--target", folder]
    least = ".".join(map(str, FIRST_PIP))
    done = subprocess.run([*own, *newer, f"pip>={least}"], capture_output=True, check=False)
    if done.returncode == 0:
        return [sys.executable, str(Path(folder, "pip"))], True
    return own, False


def is_left_out(package: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Return whether to leave a package out: it matches UNUSED, and no pattern keeps it."""
    name = normalized(package)
    if name in KEPT or any(pattern.fullmatch(name) for pattern in patterns):
        return False
    return UNUSED.fullmatch(name) is not None


def normalized(package: str) -> str:
    """Normalize a package's name as indexes do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()
