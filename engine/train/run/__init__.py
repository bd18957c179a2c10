"""A run from start to end: set-up, the training loop, what is measured around steps, and checkpoints."""
