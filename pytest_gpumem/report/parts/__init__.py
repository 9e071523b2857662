"""Parts of reports that several renderers share, as renderers do not import each other."""
