"""The processes of a run on one machine: started, watched, taken down, and started again."""
