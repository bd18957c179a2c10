"""Several processes on one run: started, agreeing on what happened, sharing gradients."""
