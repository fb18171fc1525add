"""Did it learn: exact match by generation, base vs tuned."""
