#!/usr/bin/env bash
# Makes .ci/constraints.txt, with uv (pip install uv): versions of all packages, for every Python that pyproject.toml
# allows, each from its first patch release on (3.11.0: Debian 12 has 3.11.2). What is there stays, as far as it
# can; arguments go to uv. Of these .ci/examples.txt has the packages of the examples, without NVIDIA's and Triton.
#
#   bash .ci/constraints.sh                            after a change of pyproject.toml
#   bash .ci/constraints.sh --upgrade-package torch    a newer one of a package
#   bash .ci/constraints.sh --upgrade                  of all
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
file=.ci/constraints.txt
command -v uv >/dev/null || { echo 'error: uv not found: pip install uv' >&2; exit 1; }

lowest=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' pyproject.toml)
extras=()
for extra in nvml html examples docs test dev; do extras+=(--extra "$extra"); done
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

echo pip >"$made/pip.in"
sed 's/===/==/' "$file" >"$made/constraints.txt"
uv pip compile --quiet --universal --python-version "$lowest" --no-header --no-annotate \
    --output-file "$made/constraints.txt" "${extras[@]}" "$@" pyproject.toml "$made/pip.in"
# gpumem light needs nothing but Python.
PYTHONPATH=. python3 -c 'from pytest_gpumem.cli.main import main; main()' light --excludes --cudnn >"$made/excludes.txt"
uv pip compile --quiet --universal --python-version "$lowest" --no-header --no-annotate \
    --constraint "$made/constraints.txt" --excludes "$made/excludes.txt" --output-file "$made/examples.txt" \
    --extra nvml --extra examples pyproject.toml
exactly() { # === takes no local version
    sed -E 's/^(torch|torchvision)==/\1===/' "$1"
}
{
    cat <<TEXT
# The environment of tests/run.sh and examples/run.sh, to the version: the committed baselines were measured in it.
# Made by .ci/constraints.sh.
# === takes no local version: a 2.15.0+cpu from another index has no CUDA code, and so no virtual GPU.

TEXT
    exactly "$made/constraints.txt"
} >"$made/new"
mv "$made/new" "$file"
{
    cat <<TEXT
# The packages of examples/run.sh on the virtual GPU, for pip install --no-deps -r: what the examples require, without
# NVIDIA's packages (but cuDNN) and Triton. Each line is one of constraints.txt. Made by .ci/constraints.sh.

TEXT
    exactly "$made/examples.txt"
} >"$made/new"
mv "$made/new" .ci/examples.txt
