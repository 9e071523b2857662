"""The record of a step while it runs: the allocator's history, calls of modules, tensors.

It may import base modules only.
"""
