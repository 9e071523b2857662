"""GPUs that several processes share: which worker begins with which, and whose turn it is."""
