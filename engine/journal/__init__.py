"""The record of runs: run directory, events, requests, liveness, the list of runs, the queue. Imports no torch."""
