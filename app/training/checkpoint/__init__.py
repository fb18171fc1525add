"""How a training is kept: its state on the disk, whole or not at all."""
