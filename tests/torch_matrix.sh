#!/usr/bin/env bash
# Runs the virtual GPU's tests under several versions of torch; prints a table and keeps it in
# benchmarks/results/torch_matrix.txt.
#
#   bash tests/torch_matrix.sh [VERSION ...]        the default: 2.6.0 2.7.1 2.15.0
#   VENVS=DIR   where the environments are made and kept (~/.cache/pytest-gpumem); one that is there
#               already, as DIR/torch-VERSION, is used as it is
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venvs=${VENVS:-$HOME/.cache/pytest-gpumem}
tests=(tests/devices tests/measure tests/attribution tests/plugin/test_order.py
    tests/plugin/test_budgets.py tests/testrun/test_explain.py tests/plugin/test_world.py)
[ $# -gt 0 ] || set -- 2.6.0 2.7.1 2.15.0
cd "$root"

table=
failed=0
for version in "$@"; do
    venv=$venvs/torch-$version
    if [ ! -x "$venv/bin/python" ]; then
        "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/pip" install -q "torch===$version" numpy setuptools wheel
        "$venv/bin/pip" install -q pytest pytest-xdist pytest-rerunfailures pytest-timeout hypothesis
    fi
    "$venv/bin/pip" install -q -U tabulate msgspec filelock "setuptools>=77" wheel
    "$venv/bin/pip" install -q --no-deps --no-build-isolation -e .
    log=$(mktemp)
    status=0
    "$venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider ${tests[@]} 2>&1 | tee "$log" || status=$?
    [ "$status" -eq 0 ] || failed=1
    made=$("$venv/bin/python" -c 'import torch; print(torch.__version__, torch.version.cuda)')
    table+=$(printf '%-14s CUDA %-6s %s' $made "$(tail -n 1 "$log")")$'\n'
    grep -E '^(FAILED|ERROR)' "$log" >> "$log.failed" || true
    [ ! -s "$log.failed" ] || table+=$(sed 's/^/    /' "$log.failed")$'\n'
done
{
    echo "The virtual GPU's tests, by version of torch"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; $("${PYTHON:-python3}" --version); commit $(git describe --always --dirty=+)"
    echo
    printf '%s' "$table"
} | tee benchmarks/results/torch_matrix.txt
exit "$failed"
