#!/usr/bin/env bash
# torch.compile with an installed wheel on a machine without a driver, in environments that have a torch already: Inductor
# compiles with Triton, whose launcher is linked with -lcuda. Prints a line an environment, kept in
# benchmarks/results/inductor.txt.
#
#   bash release/inductor.sh WHEEL PYTHON...
#
# Each interpreter lends its packages to an environment of its own, into which the wheel is installed.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
wheel=$(realpath -- "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH LD_PRELOAD LIBRARY_PATH
export TORCHINDUCTOR_COMPILE_THREADS=1

cat > "$work/step.py" <<'STEP'
import pytest_gpumem, sys

pytest_gpumem.use_virtual_gpu("A100-80GB")
import torch

assert pytest_gpumem.__file__.startswith(sys.prefix), pytest_gpumem.__file__
net = torch.compile(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)).cuda())
net(torch.randn(256, 512, device="cuda")).square().sum().backward()
from torch._inductor.metrics import generated_kernel_count

assert generated_kernel_count, "Inductor made no kernel"
mib = torch.cuda.max_memory_allocated() / 2**20
print(f"torch {torch.__version__}: {generated_kernel_count} kernels of Inductor, {mib:.2f} MiB allocated")
STEP
{
    echo "torch.compile with the installed wheel, no driver"
    echo "date $(date -u '+%Y-%m-%d %H:%M UTC'); commit $(git -C "$root" rev-parse --short HEAD); $(basename "$wheel")"
    for lender in "$@"; do
        environment=$work/$(basename "$(dirname "$(dirname "$lender")")")
        "$lender" -m venv "$environment"
        lent=$("$lender" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
        site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$environment/bin/python" -m pip install -q --no-deps "$wheel"
        echo "$lent" > "$site/zz-lent.pth" # once pip, which would find another copy there, is through
        ls "$site"/pytest_gpumem/devices/virtual/native/libcuda.so > /dev/null
        export TORCHINDUCTOR_CACHE_DIR=$environment/inductor TRITON_CACHE_DIR=$environment/triton
        (cd "$work" && "$environment/bin/python" step.py 2> "$work/log") || { tail -n 5 "$work/log"; exit 1; }
    done
} | tee "$root/benchmarks/results/inductor.txt"
