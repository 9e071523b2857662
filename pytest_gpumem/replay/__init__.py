"""Replays a run's requests to PyTorch's allocator with other sizes; the step itself does not run.

It may import meter, devices, recording and base modules.
"""
