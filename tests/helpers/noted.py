"""Notes for tests that compare only their texts."""

from __future__ import annotations

from pytest_gpumem.notes import NoteKind, notes_of


def noted(*texts):
    """Return notes of the kind "other" with these sentences."""
    return notes_of(NoteKind.OTHER, texts)


def texts_of(notes):
    """Return the sentences of notes."""
    return tuple(note.text for note in notes)
