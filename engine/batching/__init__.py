"""Cuts a step's sequences into micro-batches that fit: the cost of a micro-batch, the learned budget, the cut."""
