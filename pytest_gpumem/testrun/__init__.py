"""One marked test: run, run again, explained.

It may import baselines, fit and the rooms below.
"""
