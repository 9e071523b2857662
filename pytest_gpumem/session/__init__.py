"""A session: its settings, the results of its judged tests, its reports and its text.

Nothing here depends on pytest: ``gpumem run`` has a session with one program.
"""
