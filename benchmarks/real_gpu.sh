#!/usr/bin/env bash
# All that needs a real GPU, within a time limit (docs/how-to/on-a-real-gpu.md):
#
#   bash benchmarks/real_gpu.sh [--dry CARD] SECONDS PART...
#
# Runs the parts in their order until SECONDS are over; each has a limit of its own as well. After each part all results
# so far are one archive in $OUT, real-gpu-N.tgz, and $SUMMARY has a line on the part. A part: build machine checks
# verify matrix attribution tests sweep examples overhead.
#
#   --dry H100               a dry run: the virtual GPU of this card in the place of a real one
#   OUT=DIR                  where the results go (benchmarks/results/real-gpu)
#   SUMMARY=FILE             ($OUT/summary.txt; that of both dry runs is benchmarks/results/real_gpu_dry.txt)
#   PYTHON=python3.12        a Python with torch and pytest (python3)
#   GPUMEM_WHEELS=DIR        wheels to use beside its packages, where it has no msgspec, say
#   CHECK_ONLY, CHECK_JOBS   which jobs of the checks run, and how many at a time (tests/gpu/checks/real_gpu_checks.py)
#   MATRIX='gpt2*' MATRIX_JOBS=10 SHAPES=600   which steps, how many at a time, how many convolutions
#                            (in a dry run as many steps as there are processors)
set -uo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit
fake=
[ "${1:-}" != --dry ] || { fake=$2 && shift 2; }
case ${1:-} in '' | *[!0-9]*)
    echo "error: '${1:-}' is no number of seconds: write bash benchmarks/real_gpu.sh 400 build machine checks" >&2
    exit 2
    ;;
esac
end=$((SECONDS + $1))
shift
slow=1 jobs=10
[ -z "$fake" ] || { slow=5 jobs=$(nproc); } # a processor computes in the place of the GPU, and of many processors
python=${PYTHON:-python3}
out=${OUT:-$PWD/benchmarks/results/real-gpu}
summary=${SUMMARY:-$out/summary.txt}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site log=$work/log
mkdir -p "$site" "$log"
number=0
while [ -e "$out/real-gpu-$number.tgz" ]; do number=$((number + 1)); done
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CHECK_SITE=$site GPUMEM_FAKE_GPU=$fake
# An open device file keeps the driver from leaving the GPU between two processes, where persistence is off.
[ ! -e /dev/nvidia0 ] || exec 9</dev/nvidia0

# Beside this Python's own packages: the wheels, and this project as pip would show it (its entry point).
for wheel in ${GPUMEM_WHEELS:+"$GPUMEM_WHEELS"/*.whl}; do
    [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site"
done
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
if ! "$python" -c 'from importlib.metadata import entry_points as e; assert e(group="pytest11", name="gpumem")' 2>/dev/null; then
    info=$site/pytest_gpumem-0.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: pytest-gpumem\nVersion: 0\n' >"$info/METADATA"
    printf '[pytest11]\ngpumem = pytest_gpumem.plugin\n' >"$info/entry_points.txt"
fi

failed=
step() { # step NAME LIMIT COMMAND...
    local name=$1 limit=$(($2 * slow)) began=$SECONDS status left
    shift 2
    left=$((end - SECONDS))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 8 ]; then
        echo "$name: no time left" | tee -a "$summary"
        failed="$failed $name"
        return
    fi
    timeout -k 5 "$limit" "$@" >"$log/$name.txt" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failed="$failed $name"
    echo "$name: status $status, $((SECONDS - began)) s of $limit; $(tail -n 1 "$log/$name.txt" | cut -c1-300)" | tee -a "$summary"
    tar -czf "$work/new.tgz" -C "$log" . && mv "$work/new.tgz" "$out/real-gpu-$number.tgz"
}

{
    echo "commit $(git describe --always --dirty=+ 2>/dev/null), $(date -u '+%Y-%m-%d %H:%M') UTC${fake:+, a dry run: the virtual GPU, not a measurement}"
    "$python" -c 'import platform, os; from importlib.metadata import version
print("Python", platform.python_version(), " torch", version("torch"), f" {os.cpu_count()} cores")'
    echo "parts: $*"
} >>"$summary"
for part in "$@"; do
    case $part in
        build) step build 90 "$python" setup.py --quiet build_ext --inplace ;; # one built elsewhere may want another glibc
        machine)
            step machine 60 bash -c "uname -a; nproc; free -g; ls -l /dev/nvidia*; nvidia-smi -q -d MEMORY,PERFORMANCE; nvidia-smi
                ldconfig -p | grep -E 'libcuda\\.so|nvidia-ml'; '$python' pytest_gpumem/devices/driver.py; '$python' -m pip list; true"
            ;;
        checks)
            OUT=$log CHECK_JOBS=${CHECK_JOBS:-$([ -n "$fake" ] && echo 1 || echo 6)} CHECK_DEADLINE=$((165 * slow)) step checks 190 \
                "$python" -m pytest -p no:gpumem -p no:cacheprovider -c /dev/null -o addopts= --rootdir="$PWD/tests/gpu/checks" \
                -q --tb=short tests/gpu/checks/real_gpu_checks.py
            ;;
        verify)
            if [ -n "$fake" ]; then # the real half's process alone gets the stand-in
                mkdir -p "$work/stand-in"
                printf 'import sys\nif sys.orig_argv[-1].endswith("measured.json"):\n    import fake_gpu\n' >"$work/stand-in/sitecustomize.py"
            fi
            PYTHONPATH=${fake:+$work/stand-in:$PWD/tests/gpu:}$PYTHONPATH step verify 110 \
                "$python" -m pytest_gpumem verify --json "$log/verify.json"
            ;;
        tests)
            step tests 180 "$python" -m pytest tests/gpu -o addopts= -p pytester -p no:asyncio -p no:randomly \
                -p no:cacheprovider -ra --durations=20 --tb=short --gpumem-device=cuda
            ;;
        matrix)
            read -ra only <<<"${MATRIX:-*}"
            set -f # the wildcards are run.py's
            OMP_NUM_THREADS=2 step matrix 210 "$python" -m benchmarks.fidelity.run --jobs "${MATRIX_JOBS:-$jobs}" --timeout $((90 * slow)) \
                ${fake:+--virtual "$fake"} --only "${only[@]}" --out "$log/fidelity-real.json"
            set +f
            ;;
        sweep) step sweep 60 "$python" -m benchmarks.cudnn.real_gpu --count "${SHAPES:-600}" ${fake:+--virtual "$fake"} --out "$log/conv-real.csv" ;;
        overhead) step overhead 50 "$python" -m benchmarks.speed.overhead --dry ${fake:+--virtual "$fake"} ;;
        attribution) step attribution 60 "$python" -m benchmarks.speed.attribution --dry --repeats 3 ${fake:+--virtual} ;;
        examples)
            # The stand-in computes no values, and one test looks at its loss.
            cp -r examples "$work/examples" # with an ini file of its own: warnings are no errors
            printf '[pytest]\n' >"$work/pytest.ini"
            PYTHONPATH=${fake:+$PWD/tests/gpu:}$PYTHONPATH step examples 120 "$python" -m pytest "$work/examples" -c "$work/pytest.ini" \
                -p no:cacheprovider -q --tb=line ${fake:+-p fake_gpu} --gpumem-device=cuda --gpumem-baseline-dir="$log/baselines" \
                --gpumem-update-baselines --gpumem-attribution=off -k "not test_two_devices${fake:+ and not test_training_and_validation}"
            ;;
        *) echo "error: '$part' is no part: write some of those that benchmarks/real_gpu.sh names at its top" >&2 && failed="$failed $part" ;;
    esac
done
grep -hE '^(FAILED|ERROR) [^ ]*/' "$log"/*.txt | cut -c1-220
echo "results: $out/real-gpu-$number.tgz"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
