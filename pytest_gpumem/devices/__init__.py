"""Where a step runs: real GPUs, the virtual GPU, and cards.

It may import base modules only.
"""
