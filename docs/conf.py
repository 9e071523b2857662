"""Sphinx's settings. The pages are README.md, CHANGELOG.md, docs and examples/README.md.

    sphinx-build -W -c docs . build/docs                # open build/docs/docs/index.html
    sphinx-build -b linkcheck -c docs . build/links     # asks for the addresses outside as well

Links are written as on GitHub, to files from where they stand: they work there and on the pages.
"""

from pathlib import Path

from sphinx.addnodes import pending_xref

project = "pytest-gpumem"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
html_show_copyright = False

root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "examples/README.md"]
exclude_patterns = ["build"]
nitpicky = True  # with -W a link to what is not there is an error, a heading included
myst_heading_anchors = 3


def setup(app):  # noqa: ANN001, ANN201, D103 - Sphinx's hook
    app.connect("doctree-read", _folders_as_text)


def _folders_as_text(app, doctree):  # noqa: ANN001, ANN202, ARG001 - Sphinx's hook
    """Show links to folders, which have no page, as text; GitHub lists what is in them."""
    here = Path(doctree["source"]).parent
    for node in list(doctree.findall(pending_xref)):
        if (here / node["reftarget"]).is_dir():
            node.replace_self(node.children)
