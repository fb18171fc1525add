"""Benchmarks with bars: `python -m benchmarks [NAME]`."""
