# shellcheck shell=bash
# Sourced by tests/run.sh, examples/run.sh and .ci/run: makes .venv in the project's root with the
# project installed editable in it, and exports what is needed to use it. Sets root and venv.
# Where nothing has changed since the last time, checksums are compared and nothing else is run.
#
#   PYTHON=python3.12   the Python to make .venv with (unset: python3, or the one .venv has)

unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
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
    env_packages=$(cd "$root" && env_sha256 pyproject.toml .ci/constraints.txt | env_sha256)
    env_native=$(
        cd "$root" || exit
        LC_ALL=C
        shopt -s nullglob
        env_sha256 setup.py pytest_gpumem/devices/virtual/native/*/*.[ch] | env_sha256
    )
}

# What the stamp of the last success says of the same.
env_read_stamp() {
    had_place='' had_asked='' had_packages='' had_native=''
    [ -f "$env_stamp" ] || return 0
    {
        read -r had_place
        read -r had_asked
        read -r had_packages
        read -r had_native
    } <"$env_stamp" || true
}

env_write_stamp() {
    env_look
    printf '%s\n' "$env_place" "$had_asked" "$1" "$2" >"$env_stamp.new"
    mv "$env_stamp.new" "$env_stamp"
}

env_same_place() {
    [ -x "$venv/bin/python" ] && [ "$env_place" = "$had_place" ] &&
        [ "${PYTHON:-$had_asked}" = "$had_asked" ]
}

env_ready() {
    env_look
    env_read_stamp
    env_same_place && [ "$env_packages" = "$had_packages" ] && [ "$env_native" = "$had_native" ]
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
    env_check_python || return
    echo "setting up .venv (about 6 GB, minutes the first time)"
    "${PYTHON:-python3}" -m venv --clear "$venv" ||
        env_fail "$venv cannot be made (see above)"
}

env_pip() {
    (cd "$root" && "$venv/bin/python" -m pip --no-input --disable-pip-version-check "$@") >>"$env_log" 2>&1 && return
    tail -n 25 "$env_log" >&2
    env_fail "pip $1 failed; all it said is in $env_log"
}

env_install() {
    env_pip install -c .ci/constraints.txt pip setuptools wheel &&
        env_pip install -c .ci/constraints.txt --no-build-isolation \
            -e '.[nvml,html,examples,docs,test,dev]'
}

env_build_native() {
    (cd "$root" && "$venv/bin/python" setup.py --quiet build_ext --inplace) >>"$env_log" 2>&1 && return
    tail -n 25 "$env_log" >&2
    env_fail "the native part cannot be built; all that was said is in $env_log"
}

# One at a time. Without a stamp, .venv may be half of one, and is made anew.
env_set_up() {
    local packages native
    packages=$env_packages native=$env_native # as they were before: what changes meanwhile is seen next time
    if ! env_same_place; then
        env_make_venv || return
        had_packages='' had_asked=${PYTHON:-python3}
    fi
    rm -f "$env_stamp"
    if [ "$packages" != "$had_packages" ]; then
        case $had_packages in
            '') ;;
            none) echo "setting up .venv, where it failed before" ;;
            *) echo "updating .venv: pyproject.toml or .ci/constraints.txt has changed" ;;
        esac
        if ! env_install; then
            # pip undoes what it cannot finish: .venv is as it was, and is tried again next time.
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
            exec 9>"$root/.venv.lock"
            flock -n 9 || { echo "waiting for another set-up of .venv" && flock 9; }
        fi
        env_ready || env_set_up
    )
}

env_ensure || return 1
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
