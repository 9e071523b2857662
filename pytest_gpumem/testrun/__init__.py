"""Running, judging and re-running one marked test.

It gets explanations from the package ``explain`` through the interface in ``explainer.py``. It may
import baselines, fit, replay and the packages below.
"""
