"""How the ranks of a run share weights, gradients, samples, checkpoints and evaluation."""
