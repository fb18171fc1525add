"""Make the samples and the tiny base that ship: python -m tools.tiny_base.write."""
