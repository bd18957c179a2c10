"""Checkpoints: what they hold, and how they are written, pruned and restored."""
