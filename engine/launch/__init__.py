"""The start of runs: a run is created, its engine process started, the queue worked off."""
