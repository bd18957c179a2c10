"""STARTING RUNS: create a run, start its engine process, work through a queue, write jobs for Slurm and SkyPilot."""
