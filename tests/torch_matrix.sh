#!/usr/bin/env bash
# Runs the virtual GPU's tests under several versions of torch and Python; prints a table and keeps it in
# benchmarks/results/torch_matrix.txt.
#
#   bash tests/torch_matrix.sh [VERSION[@PYTHON] ...]   the default: 2.6.0 2.7.1 2.15.0
#   bash tests/torch_matrix.sh 2.14.1@python3.10 2.15.0@python3.12 2.15.0@python3.13
#   RESULT=python_matrix   the name of another result
#   TESTS="tests/meter ..."   other tests
#   VENVS=DIR   where the environments are made and kept (~/.cache/pytest-gpumem); one that is there
#               already, as DIR/torch-VERSION or DIR/torch-VERSION@PYTHON, is used as it is
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venvs=${VENVS:-$HOME/.cache/pytest-gpumem}
read -ra tests <<<"${TESTS:-tests/devices tests/meter tests/attribution tests/plugin/test_order.py \
    tests/plugin/test_budgets.py tests/testrun/test_explain.py tests/plugin/test_world.py}"
result=${RESULT:-torch_matrix}
[ $# -gt 0 ] || set -- 2.6.0 2.7.1 2.15.0
cd "$root"

table=
failed=0
for entry in "$@"; do
    version=${entry%%@*}
    venv=$venvs/torch-$entry
    if [ ! -x "$venv/bin/python" ]; then
        python=${PYTHON:-python3}
        [ "$entry" = "$version" ] || python=${entry#*@}
        "$python" -m venv "$venv"
        "$venv/bin/pip" install -q "torch===$version" numpy setuptools wheel
        "$venv/bin/pip" install -q pytest pytest-xdist pytest-rerunfailures pytest-timeout hypothesis
    fi
    "$venv/bin/pip" install -q -U tabulate msgspec filelock wcwidth "setuptools>=77" wheel
    "$venv/bin/pip" install -q --no-deps --no-build-isolation -e .
    log=$(mktemp)
    status=0
    "$venv/bin/python" -m pytest -q -n "${WORKERS:-2}" -p no:cacheprovider ${tests[@]} 2>&1 | tee "$log" || status=$?
    [ "$status" -eq 0 ] || failed=1
    made=$("$venv/bin/python" -c 'import platform, torch
print(torch.__version__, torch.version.cuda, platform.python_version())')
    table+=$(printf '%-14s CUDA %-6s Python %-7s %s' $made "$(tail -n 1 "$log")")$'\n'
    grep -E '^(FAILED|ERROR)' "$log" >> "$log.failed" || true
    [ ! -s "$log.failed" ] || table+=$(sed 's/^/    /' "$log.failed")$'\n'
done
{
    echo "The virtual GPU's tests, by version of torch and Python: ${tests[*]}"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $(git describe --always --dirty=+)"
    echo
    printf '%s' "$table"
} | tee "benchmarks/results/$result.txt"
exit "$failed"
