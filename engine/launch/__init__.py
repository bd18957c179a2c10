"""Starting runs: create a run, start its engine process, work the queue, write jobs for Slurm and SkyPilot."""
