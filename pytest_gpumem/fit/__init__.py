"""The search for the largest size that fits, and how memory grows with a size.

It may import meter, devices, recording and base modules.
"""
