"""Running, judging and re-running one marked test.

It asks the room ``explain`` for reasons through the interface in ``explainer.py``, and may import
baselines, fit, replay and the rooms below.
"""
