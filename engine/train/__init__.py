"""The training loop, the step transaction, backoff and checkpoints."""
