"""What do libraries' own memory tests take with two releases, each release with its own tests?

    python -m benchmarks.ecosystem.two_releases diffusers=REPOSITORY torchtitan=REPOSITORY

Each REPOSITORY is a git directory with the tags; nothing is fetched. The tests of each tag run
unmodified on the virtual GPU, with the library of this tag; the peaks are then compared, as the
library's maintainers would before a release. benchmarks/results/two_releases.txt is a recorded run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.ecosystem.upstream import run_tests
from benchmarks.harness import line, publish

HANGS_S = 3000
FAILED = {"failure", "error"}


class Suite(NamedTuple):
    """Tests of a repository that both tags have."""

    repository: str
    """its name on the command line"""
    tags: tuple[str, str]
    """of the older release and of the newer one"""
    paths: tuple[str, ...]
    """files or folders, from the repository's root"""
    select: tuple[str, ...] = ()
    """options of pytest that select some of their tests"""


FILES = {
    "diffusers": ("src", "tests", "pyproject.toml"),
    "torchtitan": ("torchtitan", "tests/unit_tests", "pyproject.toml"),
}
"""what is unpacked of a repository"""

DIFFUSERS = ("v0.39.0", "v0.40.0")
TORCHTITAN = ("v0.2.1", "v0.2.2")
SUITES = (
    Suite("diffusers", DIFFUSERS, ("tests/hooks/test_group_offloading.py",)),
    Suite(
        "diffusers",
        DIFFUSERS,
        (
            "tests/models/transformers/test_models_transformer_flux.py",
            "tests/models/transformers/test_models_transformer_wan.py",
            "tests/models/autoencoders/test_models_autoencoder_kl.py",
            "tests/models/autoencoders/test_models_autoencoder_wan.py",
        ),
        ("-m", "memory"),
    ),
    Suite("torchtitan", TORCHTITAN, ("tests/unit_tests/test_activation_checkpoint.py",)),
)


def unpacked(name: str, repository: Path, tag: str, folder: Path) -> None:
    """Write a library's files of a tag to a folder, and what says that this version is there."""
    folder.mkdir(parents=True)
    files = FILES[name]
    archive = ["git", f"--git-dir={repository}", "archive", tag, *files]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=packed.stdout, check=True)
    version = tag.removeprefix("v")
    info = folder / ("src" if "src" in files else "") / f"{name}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")


def outcome(suite: Suite, checkout: Path, report: Path) -> list[str]:
    """Run a suite; write its peaks to ``report``, and return lines on what came of the tests."""
    own = (*suite.paths, *suite.select)
    cases, output = run_tests(
        checkout,
        *(*own, "-p", "mark_all_tests", "--gpumem-visible=session", "--gpumem-device=virtual"),
        *("--gpumem-values=full", f"--gpumem-json={report}"),
        limit_s=HANGS_S,
    )
    if not cases:
        return ["no tests", *(f"    | {it}" for it in output.splitlines()[-15:])]
    counts = Counter(case.tag for case in cases)
    failed = [case for case in cases if case.tag in FAILED]
    fail_alone = set()
    if failed:
        names = " or ".join({case.name.partition(".")[2].partition("[")[0] for case in failed})
        without, _ = run_tests(checkout, *own, "-k", names, "-p", "no:gpumem", limit_s=HANGS_S)
        fail_alone = {case.name for case in without if case.tag in FAILED}
    return [
        ", ".join(f"{number} {tag}" for tag, number in counts.most_common()),
        *(
            f"    {case.name}: {case.tag}: {case.message}"
            f"{'; it fails without this package too' if case.name in fail_alone else ''}"
            for case in failed
        ),
    ]


def compared(old: Path, new: Path) -> list[str]:
    """Return what ``gpumem compare`` says of two reports."""
    command = [sys.executable, "-m", "pytest_gpumem.cli", "compare", str(old), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).replace(f"{old.parent}/", "").strip().splitlines()


def main() -> None:
    """Run the suites of the repositories that are named, with both tags; publish."""
    repositories = dict(word.split("=", 1) for word in sys.argv[1:])
    text = [__doc__.splitlines()[0], line("transformers", "accelerate")]
    with tempfile.TemporaryDirectory() as folder:
        for number, suite in enumerate(SUITES):
            if suite.repository not in repositories:
                continue
            text += ["", f"{suite.repository}: {' '.join((*suite.paths, *suite.select))}"]
            reports = []
            for tag in suite.tags:
                checkout = Path(folder, suite.repository + tag)
                if not checkout.exists():
                    repository = Path(repositories[suite.repository])
                    unpacked(suite.repository, repository, tag, checkout)
                reports.append(Path(folder, f"{number}-{tag}.json"))
                counts, *others = outcome(suite, checkout, reports[-1])
                text += [f"  {tag}: {counts}", *others]
            if all(report.exists() for report in reports):
                text += [f"  {it}" for it in compared(*reports)]
            print("\n".join(text), flush=True)
    publish("two_releases", "\n".join(text))


if __name__ == "__main__":
    main()
