"""A repository's files: atomic replacement, reading from git, and JSON."""
