#!/usr/bin/env bash
# Everything that needs a real GPU, in one command:
#
#   bash benchmarks/real_gpu.sh [PART ...]      parts: build verify tests examples real virtual compare sweep overhead attribution repeat
#
# Needs a python3 with torch and pytest, and nothing from the network. What it leaves lies in $OUT, or in
# benchmarks/results/real-gpu/.
#
#   PYTHON=python3.12        the Python to use
#   GPUMEM_WHEELS=.whl       a folder of wheels to use beside it (tabulate, msgspec, filelock, pytest-xdist ...)
#   GPUMEM_JOBS=4            how many steps of the matrix run at a time (1)
#   GPUMEM_ONLY='gpt2*'      which steps of the matrix run (all)
#   GPUMEM_SHAPES=3000       how many convolutions are swept
#   GPUMEM_FAKE_GPU=H100     a dry run: the virtual GPU in the place of the real one
set -uo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1

python=${PYTHON:-python3}
out=${OUT:-$PWD/benchmarks/results/real-gpu}
fake=${GPUMEM_FAKE_GPU:-}
jobs=${GPUMEM_JOBS:-1}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
failed=

if [ $# -eq 0 ]; then set -- build verify tests examples real virtual compare sweep overhead attribution repeat; fi

# Beside this Python's own packages: the wheels, and this project as pip would show it (its entry point).
for wheel in ${GPUMEM_WHEELS:+"$GPUMEM_WHEELS"/*.whl}; do
    [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1
if ! "$python" -c 'from importlib.metadata import entry_points as e; assert e(group="pytest11", name="gpumem")' 2>/dev/null; then
    info=$site/pytest_gpumem-0.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: pytest-gpumem\nVersion: 0\n' >"$info/METADATA"
    printf '[pytest11]\ngpumem = pytest_gpumem.plugin\n' >"$info/entry_points.txt"
fi

step() { # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 started=$SECONDS status
    shift 2
    printf '\n==> %s: %s\n' "$name" "$*"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    status=${PIPESTATUS[0]}
    printf '==> %s: exit status %d, %d s\n' "$name" "$status" $((SECONDS - started))
    [ "$status" -eq 0 ] || failed="$failed $name"
}

if [ -n "$fake" ]; then
    on_gpu=(--virtual "$fake")
    card=$fake
    session=(-p fake_gpu --gpumem-device=cuda)
    export PYTHONPATH=$PWD/tests/gpu:$PYTHONPATH
else
    on_gpu=()
    session=(--gpumem-device=cuda)
    card=$("$python" - <<'EOF'
import torch
from pytest_gpumem.devices.cards import CARDS
name = torch.cuda.get_device_name(0)
print(next((card.name for card in CARDS.values() if card.device_name == name), ""))
EOF
    )
    [ -n "$card" ] || echo "no profile of this GPU: the virtual side is left out"
fi
# What needs two GPUs is left out where there is one.
count=1
[ -n "$fake" ] || count=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ "$count" -gt 1 ] && few=() || few=(--deselect examples/test_fits_on_t4.py::test_two_devices)
read -ra only <<<"${GPUMEM_ONLY:-*}"
set -f # the wildcards are run.py's
matrix=("$python" -m benchmarks.fidelity.run --jobs "$jobs" --timeout 120 --only "${only[@]}")

for part in "$@"; do
    case $part in
        build)
            # A library built elsewhere may want a newer glibc than is here.
            step build 120 "$python" setup.py --quiet build_ext --inplace
            ;;
        verify) [ -n "$fake" ] || step verify 300 "$python" -m pytest_gpumem.cli verify --json "$out/verify.json" ;;
        tests) step tests 560 "$python" -m pytest tests/gpu -o addopts= -p pytester -p no:asyncio -p no:randomly -ra --durations=5 "${session[@]:(-1)}" ;;
        examples)
            step examples 560 "$python" -m pytest examples -o addopts= -v "${session[@]}" "${few[@]}" \
                --gpumem-baseline-dir="$out/baselines" --gpumem-update-baselines
            ;;
        real) step real 560 "${matrix[@]}" "${on_gpu[@]}" --out "$out/fidelity-real.json" ;;
        virtual) [ -z "$card" ] || step virtual 560 "${matrix[@]}" --virtual "$card" --out "$out/fidelity-virtual.json" ;;
        compare) step compare 60 "$python" -m benchmarks.fidelity.compare "$out/fidelity-real.json" "$out/fidelity-virtual.json" ;;
        sweep) # cuDNN's workspaces
            sweep=("$python" -m benchmarks.cudnn.real_gpu)
            step sweep-real 560 "${sweep[@]}" --count "${GPUMEM_SHAPES:-3000}" "${on_gpu[@]}" --out "$out/conv-real.csv"
            [ -z "$card" ] || {
                step sweep-virtual 560 "${sweep[@]}" --count "${GPUMEM_SHAPES:-3000}" --virtual "$card" --out "$out/conv-virtual.csv"
                step sweep-compare 60 "${sweep[@]}" --compare "$out/conv-real.csv" "$out/conv-virtual.csv"
            }
            ;;
        overhead) step overhead 120 "$python" -m benchmarks.speed.overhead "${on_gpu[@]}" ;;
        attribution) step attribution 200 "$python" -m benchmarks.speed.attribution ${fake:+--virtual} ;;
        repeat) [ -n "$fake" ] || step repeat 500 "$python" -m benchmarks.fidelity.repeatability --device cuda --repeats 3 ;;
        *) echo "no such part: $part" >&2 && failed="$failed $part" ;;
    esac
done
# One archive beside the files: what brings files back may take few of them.
tar -czf "$out/all.tar.gz" -C "$out" --exclude=all.tar.gz . 2>/dev/null || true
printf '\nresults: %s\n' "$out"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
