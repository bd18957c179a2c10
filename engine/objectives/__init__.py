"""Objectives of training: each a function from the log-probabilities of sequences to a loss and its metrics."""
