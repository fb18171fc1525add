"""Audit the data before training: what is trained on, what overlaps, what is wrong with it."""
