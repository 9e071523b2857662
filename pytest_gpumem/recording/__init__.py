"""Record a running step: the allocator's history, calls of modules, tensors."""
