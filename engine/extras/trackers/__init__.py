"""Experiment trackers: a process next to the engine reads the journal and forwards its metrics."""
