# shellcheck shell=bash
# Sourced by tests/run.sh and examples/run.sh, with "tests" or "examples": makes .venv in the project's
# root with the project installed editable in it and the packages that these need, and exports what is
# needed to use it. Sets root and venv. What the tests need holds what the examples need, and is added to it.
# The examples need none of NVIDIA's packages but cuDNN, and no Triton; with a real GPU they need all packages.
# Where nothing has changed since the last time, checksums are compared and nothing else is run.
#
#   PYTHON=python3.12        the Python to make .venv with (unset: python3, or the one .venv has)
#   GPUMEM_VENV=.venv-3.12   another folder than .venv, from the project's root

unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
env_purpose=$1
if [ "$env_purpose" = examples ] && "${PYTHON:-python3}" -I "$root/pytest_gpumem/devices/driver.py" >/dev/null 2>&1; then
    env_purpose=examples-on-gpu
fi
env_name=${GPUMEM_VENV:-.venv}
case $env_name in /*) venv=$env_name ;; *) venv=$root/$env_name ;; esac
env_stamp=$venv/.pytest-gpumem-stamp
env_log=$venv/setup.log

# Whatever lies around outside .venv must not be found.
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
unset PYTHONDONTWRITEBYTECODE # or every process compiles the package, the plugins and the tests anew
export PYTHONNOUSERSITE=1

env_sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi
}

# What .venv is and what it should hold: where it lies and what it runs, its packages, its native part.
env_look() {
    env_place="$root $(readlink -f "$venv/bin/python" || true)"
    env_packages=$(cd "$root" && env_sha256 pyproject.toml .ci/constraints.txt .ci/examples.txt | env_sha256)
    env_native=$(
        cd "$root" || exit
        LC_ALL=C
        shopt -s nullglob
        env_sha256 setup.py pytest_gpumem/devices/virtual/native/*/*.[ch] | env_sha256
    )
}

# What the stamp of the last success says of the same.
env_read_stamp() {
    had_place='' had_asked='' had_purpose='' had_packages='' had_native=''
    [ -f "$env_stamp" ] || return 0
    {
        read -r had_place
        read -r had_asked
        read -r had_purpose
        read -r had_packages
        read -r had_native
    } <"$env_stamp" || true
}

env_write_stamp() {
    env_look
    printf '%s\n' "$env_place" "$had_asked" "$had_purpose" "$1" "$2" >"$env_stamp.new"
    mv "$env_stamp.new" "$env_stamp"
}

env_same_place() {
    [ -x "$venv/bin/python" ] && [ "$env_place" = "$had_place" ] &&
        [ "${PYTHON:-$had_asked}" = "$had_asked" ]
}

# Whether the packages of a stamp are enough for this purpose.
env_enough() {
    [ "$had_purpose" = tests ] || [ "$had_purpose" = "$env_purpose" ]
}

env_ready() {
    env_look
    env_read_stamp
    env_same_place && env_enough && [ "$env_packages" = "$had_packages" ] && [ "$env_native" = "$had_native" ]
}

env_fail() {
    echo "error: $*" >&2
    return 1
}

env_check_python() {
    local python=${PYTHON:-python3} version
    command -v "$python" >/dev/null ||
        env_fail "$python not found: install Python 3.10 or newer, or name one: PYTHON=/path/to/python3" || return
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
        env_fail "$python does not run: name another: PYTHON=/path/to/python3" || return
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        env_fail "$python is Python $version and 3.10 or newer is needed: name one: PYTHON=/path/to/python3.11" || return
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        env_fail "Python $version cannot make environments: install its venv module (Debian, Ubuntu: apt install python$version-venv)"
}

env_make_venv() {
    local size
    env_check_python || return
    case $env_purpose in tests) size=6 ;; examples-on-gpu) size=5.5 ;; *) size=2.5 ;; esac
    echo "setting up $env_name (about $size GB, minutes the first time)"
    "${PYTHON:-python3}" -m venv --clear "$venv" ||
        env_fail "$venv cannot be made (see above)"
}

# Run a command with what it prints in the log. Where it fails, one line says what failed and why.
env_logged() { # env_logged WHAT COMMAND...
    local what=$1 cause
    shift
    printf '\n$ %s\n' "$*" >>"$env_log"
    (cd "$root" && "$@") >>"$env_log" 2>&1 && return
    cause=$(tac "$env_log" | sed '/^\$ /q' | tac | env_cause)
    env_fail "$what: ${cause:-no reason given} (all output: $env_log)"
}

# Why a command failed, in a line, from its output on standard input: an index that cannot be reached, a version
# that is not for this Python, packages that do not go together, else the last error.
env_cause() {
    sed -e 's/\x1b\[[0-9;]*m//g' -e 's/[[:space:]]*$//' | awk '
        /Retry\(total=0,.* connection broken by / {
            unreachable = $0
            sub(/.* connection broken by ./, "", unreachable)
            sub(/.: [^ ]*$/, "", unreachable)
            unreachable = "no connection to the package index: " unreachable
        }
        /^ERROR: Ignored .* require a different python version: / {
            count = split(substr($0, index($0, "version: ") + 9), versions, "; ")
            for (i = 1; i <= count; i++) {
                split(versions[i], words, " ")
                other_python[words[1]] = versions[i]
            }
        }
        /^ERROR: No matching distribution found for / {
            missing = substr($0, 8)
            version = $0
            sub(/.*=/, "", version)
            if (version in other_python) missing = missing " (" other_python[version] ")"
        }
        conflicting && NF == 0 { conflicting = 0 }
        conflicting { sub(/^ +/, ""); conflict = conflict (conflict ? "; " : "conflict: ") $0 }
        /^The conflict is caused by:/ { conflicting = 1 }
        /^ERROR: / { error = substr($0, 8) }
        /^ *[A-Za-z.]*Error: / || /: error: / { detail = $0; sub(/^ */, "", detail) }
        NF && !/^\$ / && !/^\[notice\]/ { last = $0 }
        END { print unreachable ? unreachable : conflict ? conflict : missing ? missing : \
            error && detail ? error ": " detail : error ? error : detail ? detail : last }'
}

env_pip() {
    env_logged "pip $1 failed" "$venv/bin/python" -m pip --no-input --disable-pip-version-check "$@"
}

# pip compiles modules with one process: 12,000 are compiled afterwards, with one for each core.
env_compile() {
    "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >>"$env_log" 2>&1 || true # templates are no modules
}

env_install() {
    local extras=nvml,examples
    local -x PIP_NO_COMPILE=1
    [ "$had_purpose" != tests ] || extras=nvml,html,examples,docs,test,dev
    env_pip install -c .ci/constraints.txt pip setuptools wheel || return
    if [ "$had_purpose" = examples ]; then
        env_pip install --no-deps -r .ci/examples.txt &&
            env_pip install --no-deps --no-build-isolation -e .
    else
        env_pip install -c .ci/constraints.txt --no-build-isolation -e ".[$extras]"
    fi || return
    env_compile
}

env_build_native() {
    env_logged "the native part cannot be built" "$venv/bin/python" setup.py --quiet build_ext --inplace
}

# One at a time. Without a stamp, .venv may be half of one, and is made anew.
env_set_up() {
    local packages native enough=1 lacking
    packages=$env_packages native=$env_native # as they were before: what changes meanwhile is seen next time
    if ! env_same_place; then
        env_make_venv || return
        had_packages='' had_purpose='' had_asked=${PYTHON:-python3}
    fi
    rm -f "$env_stamp"
    env_enough || enough=0
    if [ "$packages" != "$had_packages" ] || [ "$enough" = 0 ]; then
        case $had_packages in
            '') ;;
            none) echo "setting up $env_name, where it failed before" ;;
            "$packages") echo "adding to $env_name what the ${env_purpose//-/ } need" ;;
            *) echo "updating $env_name: pyproject.toml, .ci/constraints.txt or .ci/examples.txt has changed" ;;
        esac
        lacking=$had_purpose
        [ "$enough" = 1 ] || had_purpose=$env_purpose
        if ! env_install; then
            # pip undoes what it cannot finish: .venv is as it was, and is tried again next time.
            had_purpose=$lacking
            env_write_stamp "${had_packages:-none}" none
            return 1
        fi
    else
        echo "building the native part anew"
        env_build_native || return
    fi
    if [ -e "$root/pytest_gpumem/devices/virtual/native/libgpumem_cuda.so" ]; then
        env_write_stamp "$packages" "$native"
    else
        env_write_stamp "$packages" none # tried again next time: a compiler may have come
        echo "warning: there will be no virtual GPU: $(cat "$root/pytest_gpumem/devices/virtual/native/build-status.txt")" >&2
    fi
}

env_ensure() {
    env_ready && return
    (
        trap 'exit 130' INT TERM # pip would leave half a package: no stamp, so .venv is made anew
        if command -v flock >/dev/null; then
            exec 9>"$venv.lock"
            flock -n 9 || { echo "waiting for another set-up of $env_name" && flock 9; }
        fi
        env_ready || env_set_up
    )
}

env_ensure || return 1
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
