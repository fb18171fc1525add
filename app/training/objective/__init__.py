"""What a run minimizes: one objective a file, and the exact sums of their losses."""
