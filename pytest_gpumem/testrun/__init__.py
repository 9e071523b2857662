"""Running, judging and re-running one marked test; ``explainer.py`` is explain's interface.

It may import baselines, fit, replay and the rooms below.
"""
