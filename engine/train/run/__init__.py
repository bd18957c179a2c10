"""A run from start to end: set-up, training loop, evaluations, checkpoints, measurements."""
