"""Run git with a committer's name and without signing."""

from __future__ import annotations

import subprocess


def git(*arguments):
    """Run a command; return its output."""
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit(message):
    """Commit all files."""
    git("add", "-A")
    git("commit", "-qm", message)
