"""Figures in the forms of services that track benchmarks over time."""
