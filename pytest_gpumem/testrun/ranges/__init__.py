"""The range of a peak where a GPU may do otherwise: a run's requests, served once more."""
