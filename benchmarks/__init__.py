"""Measurements: `python -m benchmarks` runs them all, prints tables and writes JSON."""
