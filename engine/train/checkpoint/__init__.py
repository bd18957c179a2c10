"""Checkpoints: what they hold, written, pruned, gone back to."""
