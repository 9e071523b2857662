"""Reports: one record of a session, and one renderer a format, each of which returns text."""
