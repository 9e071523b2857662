"""The cause of a peak: a recording is put into categories and source lines.

It may import recording and base modules.
"""
