"""release/prepare.py: nothing is changed until all is checked and built."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading

import pytest
import yaml
from helpers.paths import ROOT
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.append(str(ROOT / "release"))

from prepare import EDITS, ReleaseError, edited, prepare, releases_of, require_own_name

FILES = {name: (ROOT / name).read_text(encoding="utf-8") for name in {edit.file for edit in EDITS}}


@pytest.fixture
def index():
    """A package index; what it has is a dictionary: versions by name."""
    projects = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/").split("/")[-1]
            if name not in projects:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(projects[name]).encode())

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield projects, f"http://127.0.0.1:{server.server_port}/simple/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def repository(tmp_path):
    """A repository with the files that a release changes; returns a function that runs git."""
    root = tmp_path / "repository"
    root.mkdir()
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")

    def git(*arguments):
        done = subprocess.run(
            ("git", "-C", root, *arguments), capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    git("config", "user.name", "t")
    git("config", "user.email", "t@example.org")
    git("config", "commit.gpgsign", "false")
    git("add", "--all")
    git("commit", "--quiet", "--message", "A commit")
    return root, git


BUILDS = ("sh", "-c", 'mkdir -p "$1" && cp pyproject.toml CHANGELOG.md "$1"', "build")


def test_a_release_is_built_from_its_own_commit_and_then_tagged(repository, index, tmp_path):
    root, git = repository
    dist = tmp_path / "dist"
    told = prepare(Version("0.2.0"), root=root, index=index[1], build=BUILDS, dist=dist)
    assert 'version = "0.2.0"' in (dist / "pyproject.toml").read_text(encoding="utf-8")
    assert "\n## 0.2.0 - 20" in (dist / "CHANGELOG.md").read_text(encoding="utf-8")
    assert git("log", "-1", "--format=%s") == "Release 0.2.0"
    assert git("rev-parse", "v0.2.0^{commit}") == git("rev-parse", "HEAD")
    assert git("status", "--porcelain") == ""
    assert git("worktree", "list").count("\n") == 0
    for name in FILES:
        assert "archive/main.tar.gz" not in (root / name).read_text(encoding="utf-8")
    assert f"git push --atomic origin main v0.2.0\n    python -m twine upload {dist}/*" in told


def refused(repository, index, version="0.2.0", build=BUILDS):
    """Prepare a release, which is refused; return why, having seen that nothing has changed."""
    root, git = repository
    before = git("rev-parse", "HEAD"), git("tag"), git("status", "--porcelain")
    with pytest.raises(ReleaseError) as refusal:
        prepare(Version(version), root=root, index=index[1], build=build, dist=root.parent / "dist")
    assert (git("rev-parse", "HEAD"), git("tag"), git("status", "--porcelain")) == before
    assert git("worktree", "list").count("\n") == 0
    return str(refusal.value)


def test_a_build_that_fails_leaves_no_commit_and_no_tag(repository, index):
    assert "no commit and no tag was made" in refused(repository, index, build=("false",))


def test_changes_that_are_not_committed_are_refused(repository, index):
    (repository[0] / "README.md").write_text("mine", encoding="utf-8")
    assert "not committed" in refused(repository, index)


def test_a_name_that_another_has_is_refused(repository, index):
    index[0]["pytest-gpumem"] = {"versions": ["0.0.3"]}
    assert "no tag v0.0.3: the name is another's" in refused(repository, index)


def test_the_next_release_follows_its_own_last_one(repository, index, capsys):
    root, git = repository
    git("tag", "v0.2.0")
    index[0]["pytest-gpumem"] = {"versions": ["0.2.0"]}
    assert "0.2.0 is not newer than 0.2.0" in refused(repository, index)
    index[0]["gpumem"] = {"versions": ["1.0", "2.0"]}
    prepare(Version("0.3"), root=root, index=index[1], build=BUILDS, dist=root.parent / "dist")
    assert git("tag").split() == ["v0.2.0", "v0.3"]
    assert "another project named gpumem (2.0)" in capsys.readouterr().err
    # what the first release takes away is gone by then, and not asked for
    assert "archive/main.tar.gz" in (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([], "does not answer as a package index does"),
        ({"files": []}, "KeyError('versions')"),
    ],
)
def test_an_index_that_answers_otherwise_is_named(index, answer, told):
    index[0]["x"] = answer
    with pytest.raises(ReleaseError, match=".*") as refusal:
        releases_of("x", index[1])
    assert told in str(refusal.value)
    assert releases_of("y", index[1]) == []


@pytest.mark.parametrize("index", ["http://127.0.0.1:1/simple", "pypi"])
def test_an_index_that_is_not_there_is_named(index):
    with pytest.raises(ReleaseError, match=f"^{index}/x/ does not answer.*--index"):
        releases_of("x", index)


def test_tags_of_other_things_are_no_releases():
    require_own_name(Version("0.1"), [], {"vendor", "v-old"})


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.file} {edit.pattern}")
def test_each_place_of_a_release_is_there_once(edit):
    """Of the files as they are; one that is gone is named."""
    edited(FILES, Version("9.0"), "2030-01-01", first=True)
    assert len(FILES[edit.file]) > 9
    with pytest.raises(ReleaseError, match=r"has 0 places"):
        edited({**FILES, edit.file: ""}, Version("9.0"), "2030-01-01", first=True)


def test_the_recipe_for_conda_requires_what_the_project_does():
    text = (ROOT / "release/recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [f"python {project['requires-python']}", *project["dependencies"]]
    expected = {re.sub(r"(?<=\w)(?=[<>=])", " ", it.replace("torch", "pytorch")) for it in required}
    assert {*recipe["requirements"]["run"]} == {it.replace("  ", " ") for it in expected}
    assert recipe["context"]["version"] == project["version"]
    assert recipe["about"]["license"] == project["license"]
    assert recipe["about"]["summary"] == project["description"]
