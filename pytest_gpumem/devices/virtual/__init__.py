"""The virtual GPU: PyTorch over a native library that keeps the accounts.

It may import devices and base modules.
"""
