"""Did it learn: exact match by generation, base against tuned."""
