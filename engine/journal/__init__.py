"""The record of runs: run directory, events, requests, locks, the list of runs, the queue."""
