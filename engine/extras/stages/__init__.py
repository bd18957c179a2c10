"""Runs of several stages, each an ordinary run with its own engine process; assembly of experts between them."""
