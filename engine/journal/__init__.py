"""The record of runs: run directory, events, requests, liveness, the index of runs, the queue. Imports no torch."""
