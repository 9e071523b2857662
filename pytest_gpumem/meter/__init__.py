"""Counting the caching allocator's bytes, and all that makes the count right.

It may import libraries, devices, recording and base modules.
"""
