"""The verdict on a measurement: pure functions, without I/O and without torch.

It may import base modules only.
"""
