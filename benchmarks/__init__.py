"""Benchmarks of the engine and of its memory predictions, and comparisons with other trainers. Anyone can run them."""
