"""A run's requests to PyTorch's allocator, served again with other sizes: nothing of the step runs.

It may import meter, devices, recording and base modules.
"""
