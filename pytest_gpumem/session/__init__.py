"""A session: its settings, its tests judged, their results, its reports and its text.

Nothing here knows pytest: ``gpumem run`` has a session of one program.
"""
