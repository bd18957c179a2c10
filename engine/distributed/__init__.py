"""Ranks of one run: start them, let them vote, and exchange weights, gradients and activations between them."""
