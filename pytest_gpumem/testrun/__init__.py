"""Running, judging and re-running one marked test.

It gets explanations from the room ``explain`` through the interface in ``explainer.py``. It may
import baselines, fit, replay and the rooms below.
"""
