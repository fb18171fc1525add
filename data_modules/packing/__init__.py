"""The plan of the steps: which documents share a pack, and which rank trains on them when."""
