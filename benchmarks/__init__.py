"""Measured figures against their bars. `python -m benchmarks [NAME]`."""
