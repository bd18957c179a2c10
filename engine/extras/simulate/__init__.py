"""Simulates one optimizer step of the engine on tensors without data, for `plan --exact`."""
