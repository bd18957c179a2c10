"""Experiment trackers: a process beside the engine reads the journal and forwards its metrics."""
