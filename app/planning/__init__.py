"""Memory, speed and alternatives of a run, computed without weights, GPUs or a network."""
