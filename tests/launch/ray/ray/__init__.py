"""Stands in for Ray, which is not installed."""
