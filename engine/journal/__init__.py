"""What happened: the run directory, its events, control requests, liveness, the index of runs. Light."""
