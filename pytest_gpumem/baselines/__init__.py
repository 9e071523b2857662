"""Committed baselines: folders, file format, and reading and writing.

It may import judge and base modules.
"""
