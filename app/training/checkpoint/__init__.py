"""Checkpoints of a run: on the disk as a whole or not at all."""
