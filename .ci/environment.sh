# shellcheck shell=bash
# Sourced with "tests" or "examples": makes .venv (or $GPUMEM_VENV) in the project's root, with $PYTHON (or python3) and what
# these need, and exports what is needed to use it. Sets root and venv. Where nothing has changed, files are read and no more.
unset CDPATH PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX # what lies around outside .venv must not be found
unset PYTHONDONTWRITEBYTECODE # or every process compiles the package, the plugins and the tests anew
export PYTHONNOUSERSITE=1
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${GPUMEM_VENV:-.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac
env_native=$root/pytest_gpumem/devices/virtual/native

env_place() { echo "$root $("${PYTHON:-$venv/bin/python}" -c 'import sys; print(sys.version)' 2>/dev/null)"; }
env_sum() { (cd "$root" && cat setup.py pyproject.toml .ci/*.txt "$env_native"/*/*.[ch] 2>/dev/null | cksum); }
env_made_for() { [ "$(env_sum)" = "$(cat "$venv/made-for-$1" 2>/dev/null)" ]; }
env_same_place() { [ "$(env_place)" = "$(cat "$venv/place" 2>/dev/null)" ]; }
env_ready() { env_same_place && { env_made_for tests || env_made_for "$1"; }; }
env_pip() { # its last lines say why it failed: --quiet would leave out which packages conflict
    PIP_NO_COMPILE=1 "$venv/bin/python" -m pip --no-input --disable-pip-version-check install "$@" >"$venv/pip.log" 2>&1 ||
        { tail -n 15 "$venv/pip.log" >&2 && return 1; }
}

env_install() { # what the tests need holds what the examples need
    env_pip -c .ci/constraints.txt pip setuptools wheel || return
    case $1 in
        tests) env_pip -c .ci/constraints.txt --no-build-isolation -e '.[nvml,html,examples,docs,test,dev]' ;;
        examples-on-gpu) env_pip -c .ci/constraints.txt --no-build-isolation -e '.[nvml,examples]' ;;
        *) env_pip --no-deps -r .ci/examples.txt && env_pip --no-deps --no-build-isolation -e . ;; # no package of NVIDIA's but cuDNN
    esac
}

env_set_up() ( # in a process of its own, one at a time; pip undoes what it cannot finish
    cd "$root" || exit
    trap 'exit 130' INT TERM # pip would leave half a package: without its place .venv is made anew
    if command -v flock >/dev/null; then exec 9>"$venv.lock" && flock 9; fi
    ! env_ready "$1" || exit 0 # another process has made it meanwhile
    echo "setting up ${GPUMEM_VENV:-.venv} for the $1: 2.5 to 6 GB, minutes the first time" >&2
    if ! env_same_place; then
        "${PYTHON:-python3}" -c 'import sys; sys.version_info < (3, 10) and sys.exit("PYTHON=/path/to/python3: 3.10 or newer is needed")' &&
            "${PYTHON:-python3}" -m venv --clear "$venv" || exit
    fi
    sum=$(env_sum) purpose=$1 status=0 # as the files were before: what changes meanwhile is seen next time
    [ ! -e "$venv/made-for-tests" ] || purpose=tests
    rm -f "$venv/place"
    env_install "$purpose" || status=$?
    env_place >"$venv/place"
    [ "$status" = 0 ] || exit "$status"
    "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >/dev/null 2>&1 # pip compiles with one process; templates are no modules
    if [ -e "$env_native/libgpumem_cuda.so" ]; then
        echo "$sum" >"$venv/made-for-$purpose"
    else # tried again next time: a compiler may have come
        echo "warning: there will be no virtual GPU: $(cat "$env_native/build-status.txt")" >&2
    fi
)

env_purpose=$1
if [ "$1" = examples ] && "${PYTHON:-python3}" -I "$root/pytest_gpumem/devices/driver.py" >/dev/null 2>&1; then
    env_purpose=examples-on-gpu
fi
env_ready "$env_purpose" || env_set_up "$env_purpose" || return
export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
