"""Git's answers, read as they come."""

import subprocess

import pytest

from pytest_gpumem.files.git import GitError, blob_contents


def blob(repository, content):
    """Store a blob; return its name."""
    done = subprocess.run(
        ["git", "-C", repository, "hash-object", "-w", "--stdin"],
        input=content,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_contents_come_in_the_order_of_their_names_whatever_they_are(repository):
    contents = [b"one\n", b"", b"line\n\n\x00 blob 3", b"x" * 100_000]
    names = [blob(repository, content) for content in contents]
    asked = [*names, *reversed(names)]
    assert list(blob_contents(repository, iter(asked))) == [*contents, *reversed(contents)]
    assert list(blob_contents(repository, [])) == []


def test_a_content_that_git_has_not_is_named(repository):
    """As in a clone without all of the history."""
    missing = "0" * 39 + "1"
    contents = blob_contents(repository, [blob(repository, b"there"), missing])
    assert next(contents) == b"there"
    with pytest.raises(GitError, match=f"git has no content of {missing}"):
        next(contents)
