"""Metrics, which register themselves."""
