"""The record of a session, and a renderer for each format."""
