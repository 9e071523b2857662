"""The history of baselines: as text, as JSON, and as a page with a plot of each test."""
