"""The documentation is built without a warning, and a link that leads nowhere fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from helpers.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted(ROOT.glob("docs/**/*.md"))]

pytest.importorskip("sphinx", reason="pip install 'pytest-gpumem[docs]'")
pytest.importorskip("myst_parser", reason="pip install 'pytest-gpumem[docs]'")
pytest.importorskip("furo", reason="pip install 'pytest-gpumem[docs]'")


def build(root, out):
    """Build the pages as docs/conf.py says; return the exit status and what was complained of."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def copy(tmp_path):
    """The project, of which docs may be changed."""
    root = tmp_path / "project"
    root.mkdir()
    for path in ROOT.iterdir():
        if path.suffix == ".md":
            shutil.copy(path, root)
        elif path.name in {"docs", "examples"}:
            shutil.copytree(path, root / path.name)
        elif not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    return root


def test_it_is_built_and_every_page_is_there(tmp_path):
    assert build(ROOT, tmp_path) == (0, "")
    made = [tmp_path / page.relative_to(ROOT).with_suffix(".html") for page in PAGES]
    assert [it for it in made if not it.is_file()] == []


def test_links_that_lead_nowhere_fail_it(copy, tmp_path):
    page = copy / "docs/recipes/gitlab.md"
    links = ["gone.md", "github-actions.md#gone", "../../README.md#gone", "../../tests/gone.py"]
    with page.open("a", encoding="utf-8") as file:
        file.write("".join(f"\n[link]({it})\n" for it in links))
    status, said = build(copy, tmp_path / "out")
    assert status == 1
    lines = [it for it in said.splitlines() if "WARNING" in it]
    assert len(lines) == len(links)
    assert all("docs/recipes/gitlab.md" in it and "[myst.xref_missing]" in it for it in lines)


def test_a_page_that_nobody_can_find_fails_it(copy, tmp_path):
    (copy / "docs/lost.md").write_text("# Lost\n", encoding="utf-8")
    status, said = build(copy, tmp_path / "out")
    assert status == 1
    assert "docs/lost.md: WARNING: document isn't included in any toctree" in said


def test_addresses_outside_are_encrypted_ones():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"https?://[^\s)>`\"']+", text)
    assert found
    assert [it for it in found if not it.startswith("https://")] == []
