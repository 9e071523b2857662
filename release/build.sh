#!/usr/bin/env bash
# Builds what a release has, from the last commit: the sdist, wheels for manylinux2014 (glibc 2.17 or newer) on x86_64
# and aarch64 with the virtual GPU, the wheel for any system without it, and the recipe for conda-forge (conda/recipe.yaml).
# Checks them, installs them in clean environments and uses them there.
#
#   bash release/build.sh [FOLDER]          archives go to FOLDER, dist by default, which is emptied before
#
# Each environment gets torch from the index (gigabytes). GPUMEM_TORCH_FROM names the site-packages of an environment
# whose torch, with all that it requires, is lent to them instead.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
dist=$(realpath -m -- "${1:-dist}")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH LD_PRELOAD CFLAGS LDFLAGS CC GPUMEM_PURE
mkdir -p "$work/home" "$work/tree"
export NO_COLOR=1 COLUMNS=200 HOME=$work/home XDG_CACHE_HOME=${XDG_CACHE_HOME:-$HOME/.cache}  # zig's cache

# A later zig (0.17.1) fails to link with an rpath of $ORIGIN.
"$python" -m venv "$work/tools"
tools=$work/tools/bin/python
"$tools" -m pip install -q "ziglang==0.15.2" build "setuptools>=77" wheel auditwheel twine mypy

build_all() {
    rm -rf "$dist"
    git archive HEAD | tar x -C "$work/tree"
    "$tools" -m build -q --no-isolation --sdist --outdir "$dist" "$work/tree"
    mkdir "$work/source"
    tar xzf "$dist"/*.tar.gz -C "$work/source" --strip-components 1

    local machine
    for machine in x86_64 aarch64; do
        CC="$tools -m ziglang cc -target $machine-linux-gnu.2.17" build_wheel "$work/$machine"
        "$tools" -m wheel tags --remove --platform-tag "manylinux_2_17_$machine.manylinux2014_$machine" \
            "$work/$machine"/*.whl > /dev/null
        mv "$work/$machine"/*.whl "$dist"
    done
    GPUMEM_PURE=1 build_wheel "$dist"

    local sum
    sum=$(sha256sum "$dist"/*.tar.gz | cut -d ' ' -f 1)
    mkdir "$dist/conda"
    sed "s/^  sha256: .*/  sha256: $sum/" "$work/tree/release/recipe.yaml" > "$dist/conda/recipe.yaml"
}

build_wheel() {
    rm -rf "$work/source/build" "$work/source/pytest_gpumem.egg-info"
    (cd "$work/source" && "$tools" -m build -q --no-isolation --wheel --outdir "$1" .) > "$work/log" 2>&1 \
        || { cat "$work/log"; return 1; }
}

# -- in clean environments --

environment() {  # NAME ARCHIVE
    "$python" -m venv "$work/$1"
    if [ -n "${GPUMEM_TORCH_FROM:-}" ]; then
        "$tools" "$root/release/lend_torch.py" "$GPUMEM_TORCH_FROM" "$work/lent"
        echo "$work/lent" > "$("$work/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
    fi
    "$work/$1/bin/python" -m pip install -q "$2"
    mkdir "$work/$1/project"
    cp "$root"/release/smoke/*.py "$work/$1/project"
}

said() {  # PATTERN TEXT: the text has to have it
    grep -E -- "$1" <<< "$2" || { echo "expected: $1"; echo "$2"; return 1; }
}

use() {  # NAME: with the virtual GPU
    cd "$work/$1/project"
    local bin=$work/$1/bin text
    "$bin/python" -c 'import pytest_gpumem, sys; assert pytest_gpumem.__file__.startswith(sys.prefix)'
    text=$("$bin/pytest" -q --gpumem-device=virtual --gpumem-card=T4 --gpumem-update-baselines 2>&1) || { echo "$text"; return 1; }
    said "baselines: 1 created" "$text"
    text=$("$bin/pytest" -q -v --gpumem-device=virtual --gpumem-card=T4 2>&1) || { echo "$text"; return 1; }
    said "1 passed" "$text"
    text=$("$bin/gpumem" cards)
    said "^T4 " "$text"
    text=$("$bin/gpumem" run --card T4 step.py 2>&1) || { echo "$text"; return 1; }
    said "allocated" "$text"
    typed "$1"
}

use_without() {  # NAME: where there is no GPU, virtual or not
    cd "$work/$1/project"
    local bin=$work/$1/bin text
    text=$("$bin/pytest" -q -rs 2>&1) || { echo "$text"; return 1; }
    said "SKIPPED.*wheel for any system" "$text"
    text=$("$bin/gpumem" cards)
    said "^T4 " "$text"
    if text=$("$bin/gpumem" run --card T4 step.py 2>&1); then
        echo "gpumem run found a GPU: $text"
        return 1
    fi
    said "wheel for any system" "$text"
    typed "$1"
}

typed() {  # NAME: mypy finds the package's own types
    "$tools" -m mypy --strict --python-executable "$work/$1/bin/python" --cache-dir "$work/mypy" types_of.py
}

run() {
    build_all
    cd "$root"
    (cd "$dist" && stat -c '%s %n' -- *.* conda/*)
    "$tools" release/check.py "$dist"/*.whl
    local wheel
    for wheel in "$dist"/*manylinux*.whl; do
        "$tools" -m auditwheel show "$wheel" | tr '\n' ' ' | grep -oE 'is consistent with the following platform tag: *"[^"]*"'
    done
    "$tools" -m twine check --strict "$dist"/*.whl "$dist"/*.tar.gz
    echo "-- the wheel for $(uname -m)"
    environment wheel "$(echo "$dist"/*manylinux*"$(uname -m)".whl)"
    (use wheel)
    echo "-- the sdist"
    environment sdist "$(echo "$dist"/*.tar.gz)"
    (use sdist)
    echo "-- the wheel for any system"
    environment pure "$(echo "$dist"/*-none-any.whl)"
    (use_without pure)
}

{
    echo "What a release has, built, checked, installed in clean environments and used there"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $(git describe --always); $("$python" --version); $(uname -sm)"
    "$tools" -m pip list --format=freeze 2> /dev/null | grep -E '^(auditwheel|build|setuptools|twine|wheel|ziglang)=' | tr '\n' ' '
    echo
    echo "torch: ${GPUMEM_TORCH_FROM:+lent by another environment}${GPUMEM_TORCH_FROM:-from the index}" \
        | sed "s#${GPUMEM_TORCH_FROM:-//}##"
    run
    echo "not tried: the wheel for the other machine, which was built and read only; other systems than Linux"
} > "$work/record" 2>&1 || { cat "$work/record"; exit 1; }
sed "s#$work#.#g" "$work/record" | tee "$root/benchmarks/results/release.txt"
