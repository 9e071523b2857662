"""Committed baselines: their folder, their file format, how files are replaced.

It may import judge and base modules.
"""
