"""Ranks of one run: their start, their votes, and the exchange of weights, gradients and activations."""
