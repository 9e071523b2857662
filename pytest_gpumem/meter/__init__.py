"""Measures memory with the caching allocator's statistics, and keeps other memory out of it.

It may import devices, recording and base modules.
"""
