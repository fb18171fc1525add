"""What a run minimizes: the objectives, and the exact sums of their losses."""
