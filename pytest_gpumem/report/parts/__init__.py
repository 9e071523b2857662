"""Parts of reports that several renderers share: no renderer imports another's module."""
