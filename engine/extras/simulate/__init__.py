"""Simulation of a training step on tensors without data, for models without a memory formula."""
