"""Encoded rows: tokenized, fit to the sequence length, stored, cached, read back."""
