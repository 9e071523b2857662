"""The reasons for a peak, and the remedies: lines, causes, keepers, edits, hints, advice.

It implements ``testrun/explainer.py``; with ``--gpumem-attribution=off`` no session imports it.
It may import testrun, baselines, fit, judge, meter, recording and base modules.
"""
