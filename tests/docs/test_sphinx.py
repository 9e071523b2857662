"""The documentation is built without a warning, and a link that leads nowhere fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from helpers.pages import PAGES, read
from helpers.paths import ROOT
from helpers.warm import HANGS

pytest.importorskip("sphinx", reason="pip install 'pytest-gpumem[docs]'")
pytest.importorskip("myst_parser", reason="pip install 'pytest-gpumem[docs]'")
pytest.importorskip("furo", reason="pip install 'pytest-gpumem[docs]'")


def build(root, out, builder="html"):
    """Build the pages as docs/conf.py says; return the exit status and the messages."""
    sphinx = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-b",
            builder,
            "-W",
            "--keep-going",
            "-q",
            "docs",
            str(out),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return sphinx.returncode, sphinx.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the documentation, built once, and how that ended."""
    folder = tmp_path_factory.mktemp("built")
    return folder, *build(ROOT, folder)


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


def test_it_is_built_and_every_page_is_there(built):
    folder, *ended = built
    assert ended == [0, ""]
    pages = [(folder / page).with_suffix(".html") for page in PAGES]
    assert [page for page in pages if not page.is_file()] == []


def test_a_link_to_a_file_outside_of_the_pages_leads_to_the_repository(built):
    folder, *_ = built
    accuracy = (folder / "explanation/accuracy.html").read_text(encoding="utf-8")
    repository = "https://github.com/pytest-gpumem/pytest-gpumem"
    assert f'href="{repository}/blob/main/benchmarks/results/published.txt"' in accuracy
    trust = (folder / "explanation/trust.html").read_text(encoding="utf-8")
    assert f'href="{repository}/tree/main/benchmarks"' in trust


def test_no_word_before_a_colon_is_taken_for_the_type_of_an_attribute(built):
    folder, *_ = built
    api = (folder / "reference/api.html").read_text(encoding="utf-8")
    assert "the card on the virtual GPU" in api
    assert ">Type<" not in api
    assert ">Return type<" not in api


def test_links_that_lead_nowhere_and_pages_that_nobody_can_find_fail_it(copy, tmp_path):
    (copy / "docs/lost.md").write_text("# Lost\n", encoding="utf-8")
    page = copy / "docs/how-to/gitlab.md"
    links = [
        "gone.md",
        "github-actions.md#gone",
        "../reference/marker.md#gone",
        "../../tests/gone.py",
    ]
    with page.open("a", encoding="utf-8") as file:
        file.write("".join(f"\n[link]({it})\n" for it in links))
    status, messages = build(copy, tmp_path / "out", "dummy")  # resolves all, writes nothing
    assert status == 1
    lines = [line for line in messages.splitlines() if "WARNING" in line]
    lost = [line for line in lines if "docs/lost.md" in line]
    assert len(lost) == 1
    assert "docs/lost.md: WARNING: document isn't included in any toctree" in lost[0]
    lines.remove(lost[0])
    assert len(lines) == len(links)
    assert all("docs/how-to/gitlab.md" in line and "[myst.xref_missing]" in line for line in lines)


def test_addresses_outside_are_encrypted():
    documents = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", *PAGES)
    text = "\n".join(map(read, documents))
    addresses = re.findall(r"https?://[^\s)>`\"']+", text)
    assert addresses
    assert [address for address in addresses if not address.startswith("https://")] == []


def test_read_the_docs_installs_all_requirements_but_torch():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["docs"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in required}
    commands = re.findall(r"- pip install (.*)", read(".readthedocs.yaml"))
    installed = set(re.findall(r"[\w-]+", " ".join(commands)))
    assert names - installed == {"torch"}
