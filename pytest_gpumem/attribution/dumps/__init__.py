"""Snapshots that PyTorch's allocator dumped to a file, ours or anybody's: read, and compared."""
