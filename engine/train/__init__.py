"""Training: the run, its strategy for several devices, and the optimizer step as a transaction."""
