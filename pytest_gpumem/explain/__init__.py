"""The reasons for a peak, and the remedies: lines, causes, keepers, edits, hints, advice.

``testrun/explainer.py`` alone asks for it; with ``--gpumem-attribution=off`` no session imports it.
It may import testrun, baselines, fit, judge, meter, recording and base modules.
"""
