"""Objectives: from the log-probabilities of sequences to a loss and its metrics."""
