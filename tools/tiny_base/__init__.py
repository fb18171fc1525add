"""Make the shipped samples and tiny base: python -m tools.tiny_base.write."""
