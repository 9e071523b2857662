"""Every figure of the documents comes from a module here; ``python -m benchmarks`` lists them."""
