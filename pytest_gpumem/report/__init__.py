"""One record of a session, and one renderer a format.

It may import baselines, judge and base modules.
"""
