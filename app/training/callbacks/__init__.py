"""One callback class a file."""
