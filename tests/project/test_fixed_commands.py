"""Commands that the package prints as they stand in its source: each is run as it was printed.

What pip installs comes from a folder of packages without content, with the metadata of the real
ones: pip reads them as it reads those of its index, and is not to install them.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import shlex
import tarfile
import zipfile

import pytest
from helpers.pages import Place
from helpers.printed_commands import texts_with_commands
from helpers.sources import HELPER
from helpers.warm import warm_python

GIT = "git -c user.name=a -c user.email=b@c.org"
NAME = "pytest-gpumem"


@pytest.fixture
def place(tmp_path):
    """A shell in a project."""
    place = Place(tmp_path / "a project")
    place.write("pytest.ini", "[pytest]\n")
    return place


# git


def test_a_conflict_in_a_baseline_is_ended_by_either_side_and_an_update(place):
    update = "pytest --gpumem-update-baselines"
    place.write("test_a.py", f"import torch, pytest\n{HELPER}\npytestmark = pytest.mark.gpu_memory")
    test = "\ndef test_a():\n    mib({})\n"
    place.sh(f"echo '{test.format(5)}' >> test_a.py && {update}")
    place.sh(f"git init -qb main . && git add . && {GIT} commit -qm x && git branch side")
    (path,) = (place.folder / "baselines").rglob("test_a.json")
    recorded = path.read_text(encoding="utf-8")
    for branch, peak in (("main", "1111"), ("side", "2222")):
        place.sh(f"git checkout -q {branch}")
        path.write_text(re.sub(r'("peak_allocated": \[)\d+', rf"\g<1>{peak}", recorded))
        place.sh(f"git add . && {GIT} commit -qm {branch}")
    assert place.sh(f"git checkout -q main && {GIT} merge -q side").ret == 1
    failed = place.sh("pytest")
    words = " ".join(failed.out.split())
    assert "has a merge-conflict marker" in words
    remedy = re.search(r"take one side \((.*?), or (--\w+)\) and run (--[\w-]+)", words)
    command, theirs, option = remedy.groups()
    command = command.replace("FILE", str(path.relative_to(place.folder)))
    for words, peak in ((command, "1111"), (command.replace("--ours", theirs), "2222")):
        assert place.sh(words).ret == 0
        assert f'"peak_allocated": [{peak}]' in path.read_text(encoding="utf-8")
    assert "baselines: 1 changed" in place.sh(f"pytest {option}").out


# pip


def requirement_names(extra):
    """What the package, or an extra of it, requires."""
    requirements = importlib.metadata.requires(NAME)
    marker = f'extra == "{extra}"' if extra else ""
    chosen = [it for it in requirements if it.partition(";")[2].strip().replace("'", '"') == marker]
    return {re.match(r"[\w.-]+", it)[0] for it in chosen}


BUILD = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(directory, settings=None):
    folder = pathlib.Path(directory, "pytest_gpumem.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""
"""a build of an sdist that needs no setuptools: pip would ask its index for it"""


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder of packages: this one, and what it and its extras for users require."""
    folder = tmp_path_factory.mktemp("index")
    own = importlib.metadata.metadata(NAME)
    wheels = {"torch": "Metadata-Version: 2.1\nName: torch\nVersion: 99\n"}
    wheels[NAME] = own.as_string()
    for name in {name for extra in ("", "html", "nvml") for name in requirement_names(extra)}:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "99"
        wheels[name] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for name, metadata in wheels.items():
        version = re.search("(?m)^Version: (.*)$", metadata)[1]
        stem = f"{re.sub('[-.]', '_', name)}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    stem = f"pytest_gpumem-{own['Version']}"
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as sdist:
        files = {"backend.py": BACKEND, "pyproject.toml": BUILD, "PKG-INFO": own.as_string()}
        for name, text in files.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(text.encode())
            sdist.addfile(member, io.BytesIO(text.encode()))
    return folder


OF_LIGHT = {
    "cli/light.py",
    "devices/virtual/cudnn_notes.py",
    "devices/virtual/compilation/max_autotune.py",
}
"""modules with commands for environments without NVIDIA's packages: they need a package index, or
uv; cli/test_light.py has their tests"""


def pip_commands():
    """The commands of pip that the package prints, and setup.py where it cannot build."""
    modules = texts_with_commands()
    texts = [text for name in modules.keys() - OF_LIGHT for text in modules[name]]
    found = (re.findall("pip install [^;),]+", text) for text in texts)
    return sorted({command for commands in found for command in commands})


def test_pip_finds_what_it_is_asked_for(place, index):
    pytest.importorskip("pip")
    script = index / "bin" / "pip"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{warm_python()}" -m pip "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    options = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_DRY_RUN": "1",
        "PIP_IGNORE_INSTALLED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    commands = pip_commands()  # not while tests are collected, by each worker: it takes seconds
    assert len(commands) > 1
    for command in commands:
        done = place.sh(command, PATH=f"{script.parent}:/usr/bin:/bin", **options)
        assert done.ret == 0, f"{command}: {done.err}"
        assert "WARNING" not in done.err, command
        wanted, extra = re.fullmatch(r"(.*?)(?:\[(\w+)\])?", shlex.split(command)[-1]).groups()
        names = {wanted}
        if "--no-deps" not in command and wanted == NAME:
            assert not extra or requirement_names(extra)
            names |= requirement_names("") | requirement_names(extra or "")
        (line,) = re.findall("Would install (.*)", done.out)
        installed = {word.rpartition("-")[0].replace("_", "-").lower() for word in line.split()}
        assert installed == {name.lower().replace("_", "-") for name in names}, command
