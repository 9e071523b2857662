"""One marked test: run, judged, run again. ``explainer.py`` asks for reasons.

It may import baselines, fit, replay and the rooms below.
"""
