"""Committed baselines: where they lie, what is in them, how they are replaced.

It may import judge and base modules.
"""
