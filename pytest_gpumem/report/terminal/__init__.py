"""Texts that pytest prints to the terminal."""
