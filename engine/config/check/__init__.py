"""Checking profiles, recipes and run specs: rules across keys, other tools' names, overrides, unsupported features."""
