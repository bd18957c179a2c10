"""Looks like a part of tensorboard."""
