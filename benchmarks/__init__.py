"""Benchmarks that anyone can run: of the engine, of its predictions, and of other trainers beside it."""
