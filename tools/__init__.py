"""Scripts that are not part of the program."""
