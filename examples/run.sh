#!/usr/bin/env bash
# Sets up .venv and runs the examples, on the virtual GPU where there is no real one; arguments go to pytest,
# paths in them are seen from the project's root.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../.ci/environment.sh" examples
cd "$root"

exec "$venv/bin/pytest" -o testpaths=examples "$@"
