#!/usr/bin/env bash
# Runs all tests and all examples with each Python and torch that are promised, and once more beside a stub of NVIDIA's
# driver (tests/helpers/driver_stub.py) README's test, gpumem run, gpumem verify and --gpumem-against, and all of devices.
# Records a row of each in benchmarks/results/matrix.txt. What is not run again stays there, with its own date and commit.
#
#   bash tests/matrix.sh                       all rows, one after another
#   bash tests/matrix.sh 3.10 torch-2.6.0      these
#   PYTHON=python3.11                          the Python of the rows torch-...
#   VENVS=DIR                                  where the environments are made and kept (~/.cache/pytest-gpumem), each
#                                              of about 6 GB; KEEP=0 removes each one after its row
#   PARTS="examples beside-a-driver"           these parts of a row alone; others are tests and devices-beside-a-driver
#   TESTS="tests/meter tests/cli"              other tests than all: the table is printed, and not recorded
#
# Rows: a Python, to its minor or patch version, with the versions of .ci/constraints.txt (its newest torch); torch-VERSION,
# with what that torch needs; lowest: the lowest Python, and all that pyproject.toml depends on at its lower bound.
# The packages are installed by uv where there is one, else by pip.
set -uo pipefail
unset CDPATH PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE=1
export -n PYTHON VENVS KEEP PARTS TESTS WORKERS # no test sees them
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit
venvs=${VENVS:-}
[ -n "$venvs" ] || venvs=~/.cache/pytest-gpumem
result=benchmarks/results/matrix.txt
rows=(3.10 3.11.2 3.11.7 3.12 3.13 3.14 torch-2.6.0 torch-2.7.1 torch-2.8.0 torch-2.9.1 torch-2.11.0 torch-2.13.0 lowest)
extras=nvml,html,examples,docs,test,dev
all_parts=(examples tests beside-a-driver devices-beside-a-driver)
read -ra parts <<<"${PARTS:-${all_parts[*]}}"
read -ra tests <<<"${TESTS:-}"
beside=(tests/devices/virtual/test_beside_a_driver.py tests/cli/test_verify.py tests/plugin/test_against.py)
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
cp "$result" "$made/before" 2>/dev/null || : >"$made/before"

# Print the path of a Python by its version, "3.11" or "3.11.2": on PATH, the system's, pyenv's.
python_of() {
    local version=$1 minor path own pyenv=${PYENV_ROOT:-}
    [ -n "$pyenv" ] || pyenv=~/.pyenv
    minor=$(cut -d. -f1,2 <<<"$version")
    for path in "python$minor" "/usr/bin/python$minor" "$pyenv/versions/$minor".*/bin/python; do
        own=$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
        case $own. in "$version".*) command -v "$path" && return ;; esac
    done
    return 1
}

# Print the project's lower bounds as exact versions: pytest==8.1.
lower_bounds() {
    sed -n -e '/^dependencies = \[/,/^\]/s/^ *"\([^">=]*\)>=\([0-9.]*\)".*/\1==\2/p' \
        -e 's/^\(nvml\|html\) = \["\([^">=]*\)>=\([0-9.]*\)"\]$/\2==\3/p' pyproject.toml
}

# Print the constraints but those of some packages: an extended regular expression of their names' beginnings.
constraints_without() {
    grep -vE "^($1)" .ci/constraints.txt
}

install() { # install VENV ARGUMENT...
    local venv=$1
    shift
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

# Make a row's environment; what is there already is brought up to date.
make_environment() { # make_environment ROW PYTHON VENV
    local row=$1 python=$2 venv=$3 constraints=$made/constraints
    # What a version of torch has versions of its own of.
    local of_torch='torch|triton|nvidia-[^m]|cuda-|sympy|networkx|fsspec|filelock|setuptools'
    case $row in
        torch-*)
            constraints_without "$of_torch" >"$constraints"
            echo "torch===${row#torch-}" >>"$constraints" # === takes no local version, as 2.13.0+cpu
            ;;
        lowest)
            lower_bounds >"$constraints"
            constraints_without "$of_torch|$(lower_bounds | sed 's/==.*//' | paste -sd'|')" >>"$constraints"
            ;;
        *) cp .ci/constraints.txt "$constraints" ;;
    esac
    if [ ! -x "$venv/bin/python" ]; then
        "$python" -m venv --clear "$venv" || return
    fi
    install "$venv" -c "$constraints" --upgrade pip setuptools wheel && # venv brings old ones
        install "$venv" -c "$constraints" --no-build-isolation -e ".[$extras]" &&
        "$venv/bin/python" setup.py --quiet build_ext --inplace >/dev/null
}

# pytest's closing line, without colours and time.
closing() {
    sed 's/\x1b\[[0-9;]*m//g' "$1" | grep -E '([0-9]+ (passed|failed|errors?|skipped)|no tests ran).* in [0-9.]+s' |
        tail -n 1 | sed -E 's/^[= ]*//; s/ in [0-9.]+s.*//'
}

run_row() { # run_row ROW: writes its lines into $made/ROW
    local row=$1 python venv=$venvs/$1 name status failed=0 line lines workers head
    case $row in
        torch-*) python=${PYTHON:-python3} ;;
        lowest) python=$(python_of "$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)") ;;
        *) python=$(python_of "$row") ;;
    esac || {
        printf '%-13s not run: this machine has no such Python\n' "$row" >"$made/$row"
        return 0
    }
    if ! make_environment "$row" "$python" "$venv" >"$made/log" 2>&1; then
        printf '%-13s not run: its environment could not be made: %s\n' "$row" "$(grep -iE 'error|because|×' "$made/log" | tail -n 1)" >"$made/$row"
        cat "$made/log" >&2
        return 1
    fi
    workers=${WORKERS:-$(($(getconf _NPROCESSORS_ONLN) + 1))}
    lines=
    head=$(printf '%-13s ' "$row" && "$venv/bin/python" -c 'import platform, torch
print("Python", platform.python_version(), " torch", torch.__version__, " CUDA", torch.version.cuda)')
    mkdir -p "$made/driver"
    PYTHONPATH=tests:. "$venv/bin/python" -m helpers.driver_stub "$made/driver" || return
    for name in "${all_parts[@]}"; do
        case " ${parts[*]} " in *" $name "*) ;; *)
            lines+=$(part_before "$row" "$head" "${name//-/ }")$'\n'
            continue
            ;;
        esac
        local paths=(-o "testpaths=$name") found=${LD_LIBRARY_PATH:-}
        case $name in
            tests) [ "${#tests[@]}" -eq 0 ] || paths=("${tests[@]}") ;;
            beside-a-driver) paths=("${beside[@]}") ;;
            devices-beside-a-driver) paths=(tests/devices) ;;
        esac
        case $name in *beside-a-driver) found=$made/driver${found:+:$found} ;; esac
        # The page is written once the table is complete: until then they differ.
        paths+=(--deselect tests/docs/test_matrix.py::test_the_page_says_what_the_table_says)
        status=0
        PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv LD_LIBRARY_PATH=$found "$venv/bin/pytest" -q -p no:cacheprovider -n "$workers" "${paths[@]}" 2>&1 |
            tee "$made/$name.log" || status=$?
        line=$(closing "$made/$name.log")
        [ "$status" -eq 0 ] || failed=1
        [ -n "$line" ] || line="did not come to an end (exit status $status)"
        lines+="    ${name//-/ }: $line"$'\n'
        lines+=$(grep -E "^(FAILED|ERROR) (tests|examples)/" "$made/$name.log" | sed 's/\x1b\[[0-9;]*m//g; s/^/        /')$'\n'
    done
    {
        printf '%s  %s UTC, commit %s\n' "$head" "$(date -u '+%Y-%m-%d %H:%M')" "$(git describe --always --dirty=+)"
        grep -v '^$' <<<"$lines"
    } >"$made/$row"
    [ "${KEEP:-1}" != 0 ] || rm -rf "$venv"
    return "$failed"
}

# A row's lines of the table that was there before.
row_before() {
    awk -v row="$1" '/^[^ ]/ { inside = ($1 == row) } inside && NF' "$made/before"
}

# A part's lines of the table that was there before, with their date and commit; none if the row's versions were others.
part_before() { # part_before ROW HEAD PART
    row_before "$1" | awk -v head="$2" -v part="    $3:" '
        NR == 1 { stamp = substr($0, length(head) + 3); same = index($0, head "  ") == 1 }
        /^    [^ ]/ {
            inside = same && index($0, part) == 1
            if (!/ UTC, commit /) $0 = $0 " (" stamp ")"
        }
        inside'
}

table() {
    local row
    echo "All tests and all examples by Python and torch: bash tests/matrix.sh; each row has its own date and commit"
    echo "(+: with changes that were not committed), and so has a part that was not run with its row. The rows of a Python"
    echo "have the versions of .ci/constraints.txt; lowest:"
    echo "$(lower_bounds | paste -sd' ')."
    echo
    for row in "${rows[@]}"; do
        if [ -s "$made/$row" ]; then cat "$made/$row"; else row_before "$row"; fi
    done
}

asked=("$@")
[ $# -gt 0 ] || asked=("${rows[@]}")
for row in "${asked[@]}"; do
    case " ${rows[*]} " in *" $row "*) ;; *) rows+=("$row") ;; esac
done
failed=0
for row in "${asked[@]}"; do
    echo "==> $row"
    run_row "$row" || failed=1
    if [ "${#tests[@]}" -eq 0 ]; then
        table >"$made/after" && cp "$made/after" "$result" # after each row: an interrupted run keeps what ran
    fi
done
table
exit "$failed"
