"""The record of a session, and a renderer for each format.

It may import baselines, judge and base modules.
"""
