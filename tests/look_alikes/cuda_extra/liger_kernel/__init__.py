"""Stands in for liger-kernel where it is not installed."""
