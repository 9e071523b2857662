"""Reports of several sessions as one: the shards of a suite, its devices, its machines."""
