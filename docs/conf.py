"""Sphinx's settings. Pages are in this folder; Contributing and Changelog come from the root.

    sphinx-build -W docs build/docs                # open build/docs/index.html
    sphinx-build -b linkcheck docs build/links     # asks for the addresses outside as well

Links are relative, to files from where they stand: they work on GitHub too. Links to files outside
of this folder lead to GitHub on the pages.
"""

from os.path import relpath
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.ext.napoleon import GoogleDocstring

import pytest_gpumem

project = "pytest-gpumem"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]

exclude_patterns = ["images"]
nitpicky = True  # with -W a link to what is not there is an error, a heading included
nitpick_ignore_regex = [
    ("py:.*", ".*")
]  # types of Python and torch, and private ones, have no page here
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/pytest-gpumem/pytest-gpumem"


ATTRIBUTES = {"attribute", "data", "property"}
"""kinds of objects of which napoleon takes all before a colon for a type"""


def setup(app):  # noqa: ANN001, ANN201, D103 - Sphinx's hook
    app.connect("autodoc-process-docstring", _keep, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _render, priority=600)  # after it
    app.connect("doctree-read", _lead_to_github)
    app.connect("missing-reference", _find_public_name)


def _keep(app, what, name, obj, options, lines):  # noqa: ANN001, ANN202, PLR0913, PLR0917, ARG001 - Sphinx's hook
    """Keep the docstring of an attribute as it is written."""
    if what in ATTRIBUTES:
        app.env.temp_data["gpumem_docstring"] = list(lines)


def _render(app, what, name, obj, options, lines):  # noqa: ANN001, ANN202, PLR0913, PLR0917 - Sphinx's hook
    """Read an attribute's docstring as a method's: "the device's name: ..." names no type."""
    if what in ATTRIBUTES:
        written = app.env.temp_data.pop("gpumem_docstring")
        read = GoogleDocstring(written, app.config, app, "method", name, obj, options)
        lines[:] = read.lines()


def _lead_to_github(app, doctree):  # noqa: ANN001, ANN202, ARG001 - Sphinx's hook
    """Let links to files and folders outside of the pages lead to the repository."""
    folder = Path(doctree["source"]).parent
    for node in [*doctree.findall(download_reference), *doctree.findall(pending_xref)]:
        target = node["reftarget"]
        # MyST leaves the ending of a page out; pages of the root folder are included in pages here.
        candidates = [base / f"{target}{end}" for base in (folder, ROOT) for end in ("", ".md")]
        path = next((path.resolve() for path in candidates if path.exists()), None)
        if path is None or (path.suffix == ".md" and ROOT / "docs" in path.parents):
            continue
        kind = "tree" if path.is_dir() else "blob"
        address = f"{REPOSITORY}/{kind}/main/{relpath(path, ROOT)}"
        node.replace_self(nodes.reference("", "", *node.children, refuri=address))


def _find_public_name(app, env, node, contnode):  # noqa: ANN001, ANN202 - Sphinx's hook
    """Resolve "pytest_gpumem.measurement.Peak" to pytest_gpumem.Peak, which has an entry."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in pytest_gpumem.__all__:
        return None
    domain = env.get_domain("py")
    target = f"pytest_gpumem.{name}"
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)
