"""Notes of tests that care for their words alone."""

from __future__ import annotations

from pytest_gpumem.notes import NoteKind, notes_of


def noted(*texts):
    """Sentences as notes of no kind."""
    return notes_of(NoteKind.OTHER, texts)


def texts_of(notes):
    """The sentences of notes, in a tuple."""
    return tuple(note.text for note in notes)
