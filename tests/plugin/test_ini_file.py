"""Every setting in each form of pytest's configuration file, with pytest's own types."""

import json

import pytest

from pytest_gpumem.session.settings import OPTIONS

CONFTEST = """
from pytest_gpumem.plugin.device_choice import SETTINGS

def pytest_configure(config):
    settings = config.stash.get(SETTINGS, None)
    if settings is None:  # the plugin has refused an option
        return
    print("READ", *(f"{name}={value}" for name, value in vars(settings).items()), sep="|")
"""
VALUES = {
    "card": "T4",
    "update_baselines": True,
    "html": "out/page.html",
    "device": "none",
    "all": ["tests/gpu/*", "test_it.py"],
    "cards": ["T4", "L4"],
    "visible": "session:2",
    "values": "off",
    "baseline_dir": "kept",
    "missing_baseline": "fail",
    "shrinkage": "fail",
    "provenance": "note",
    "skip_too_large": True,
    "stale": "fail",
    "attribution": "on",
    "snapshots": "out/snapshots",
    "tolerance": "2%, 64MiB",
    "guard": "allocated",
    "json": "out/report.json",
    "artifact": "gpumem",
    "markdown": "out/report.md",
    "github": "off",
}
FORMS = {
    "pytest.ini": "[pytest]",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
    "ini_options": "[tool.pytest.ini_options]",
    "native": "[tool.pytest]",
    "pytest.toml": "[pytest]",
}
NATIVE = pytest.mark.skipif(
    tuple(map(int, pytest.__version__.split(".")[:1])) < (9,), reason="pytest 9 has these forms"
)


def line_of(form, name, value):
    """A setting as this form has it."""
    if form in {"pytest.ini", "tox.ini", "setup.cfg"}:
        return f"{name} = {','.join(value) if isinstance(value, list) else value}"
    return f"{name} = {json.dumps(value)}"


def write(suite, form, **values):
    name = "pyproject.toml" if form in {"ini_options", "native"} else form
    lines = [line_of(form, name, value) for name, value in values.items()]
    suite.write(name, "\n".join([FORMS[form], *lines, ""]))


FORM = pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=NATIVE if form in {"native", "pytest.toml"} else ())
        for form in FORMS
    ],
)


def read(suite, *arguments):
    """What a session's settings say, by their names."""
    suite.write("conftest.py", CONFTEST)
    suite.write("test_it.py", "def test_it(): pass\n")
    out = suite.run("-s", "-W", "error", *arguments).out
    (line,) = [line for line in out.splitlines() if line.startswith("READ|")]
    return dict(pair.split("=", 1) for pair in line.split("|")[1:])


def test_each_setting_is_tried():
    untried = {"against"}  # it contradicts update_baselines
    assert {option.name for option in OPTIONS} == set(VALUES) | untried


@FORM
def test_each_setting_is_read_from_each_form(suite, form):
    settings = {f"gpumem_{name}": value for name, value in VALUES.items()}
    write(suite, form, **settings)
    found = read(suite)
    assert found["all"] == "('tests/gpu/*', 'test_it.py')"
    assert found["cards"] == "('T4', 'L4')"
    assert found.pop("tolerance") != "None"
    for name in ("html", "snapshots", "json", "markdown", "baseline_dir"):
        assert found[name].endswith(VALUES[name])
    for name in set(found) & set(VALUES) - {"all", "cards"}:
        assert found[name].endswith(str(VALUES[name])), name


@FORM
@pytest.mark.parametrize("value", [True, "true", "tests/gpu/*", ["tests/gpu/*"]])
def test_all_may_be_true_a_text_or_a_list(suite, form, value):
    if form in {"native", "pytest.toml"}:  # typed: pytest itself refuses other than a list
        value = value if isinstance(value, list) else [str(value).lower()]
    elif isinstance(value, bool):
        value = str(value).lower()
    typed = form in {"native", "pytest.toml"}
    write(suite, form, gpumem_all=value, gpumem_cards=["T4", "L4"] if typed else "T4,L4")
    found = read(suite)
    everything = value in ("true", ["true"])
    assert found["all"] == ("('*',)" if everything else "('tests/gpu/*',)")
    assert found["cards"] == "('T4', 'L4')"


@FORM
def test_the_command_line_comes_before_the_file(suite, form):
    write(suite, form, gpumem_all=["true"], gpumem_card="T4", gpumem_update_baselines=True)
    found = read(suite, "-o", "gpumem_all=a,b", "--gpumem-card=L4")
    assert (found["all"], found["card"], found["update_baselines"]) == ("('a', 'b')", "L4", "True")
    session = suite.run("-o", "gpumem_update_baselines=maybe")
    assert "maybe" in session.err
    assert "Traceback" not in session.out + session.err


@NATIVE
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("gpumem_update_baselines", "maybe", "expects a bool, got str"),
        ("gpumem_card", True, "expects a string, got bool"),
        ("gpumem_tolerance", 0.02, "expects a string, got float"),
        ("gpumem_all", True, "expects a list"),
    ],
)
def test_pytest_names_the_setting_with_a_value_of_another_type(suite, name, value, says):
    suite.write("pytest.toml", f"[pytest]\n{name} = {json.dumps(value)}\n")
    session = suite.run(source="def test_it(): pass\n")
    assert f"config option '{name}' {says}" in session.err
    assert "Traceback" not in session.out + session.err
