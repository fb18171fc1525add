"""Where it runs: one device, or several that hold the same weights (DDP)."""
