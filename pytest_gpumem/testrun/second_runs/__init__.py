"""Second runs of a marked test, for its need, smaller sizes, the keepers of its memory."""
