#!/usr/bin/env bash
# Sets up .venv and runs the tests but those of tests/slow.txt, or --slow those alone, or --all, or those of the paths that
# are named; other arguments go to pytest. Paths are seen from the project's root.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../.ci/environment.sh" tests
cd "$root"

# One worker more than there are cores: each waits a part of its time, for processes that its tests start.
# A worker holds a torch of its own, about 1 GB: no more than eight.
workers=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
[ "$workers" -gt 1 ] && workers=$((workers + 1)) || workers=0
[ "$workers" -le 8 ] || workers=8

# Interpreters that tests start write no bytecode (tests/conftest.py), and read this.
"$venv/bin/python" -m compileall -q pytest_gpumem tests/helpers || true

lane=(-m 'not slow')
arguments=()
for argument in "$@"; do
    case $argument in
        --all) lane=() && continue ;;
        --slow) lane=(-m slow) && continue ;;
        tests/*) [ "${lane[*]}" = '-m slow' ] || lane=() ;;
    esac
    arguments+=("$argument")
done

# A file's tests run in one worker, which makes once what they share; tests/conftest.py says in which order.
exec "$venv/bin/pytest" -o testpaths=tests -n "$workers" --dist loadfile --no-loadscope-reorder "${lane[@]}" "${arguments[@]}"
