"""What a marked test is run again for: its need, smaller sizes, the keepers of its memory."""
