#!/usr/bin/env bash
# Sets up .venv and runs the tests; arguments go to pytest, paths in them are seen from the project's root.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../.ci/environment.sh"
cd "$root"

# A worker holds a torch of its own, about 1 GB: no more than eight.
workers=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
[ "$workers" -le 8 ] || workers=8
[ "$workers" -gt 1 ] || workers=0

exec "$venv/bin/pytest" -o testpaths=tests -n "$workers" "$@"
