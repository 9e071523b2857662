"""The cause of a peak: recorded, replayed, put into categories and source lines.

It may import base modules only.
"""
