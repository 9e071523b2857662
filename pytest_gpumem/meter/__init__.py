"""Counting the caching allocator's bytes, and all that makes the count right.

It may import attribution, devices and base modules.
"""
