"""Checking files: rules across keys, names other tools use, overrides, what is not supported."""
