"""The plan of the steps: which documents share a pack, and which rank learns them when."""
