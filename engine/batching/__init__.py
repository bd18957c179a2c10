"""Splits the sequences of a step into micro-batches that fit: their cost, the learned budget, the split."""
