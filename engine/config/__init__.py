"""Profiles, recipes and run specs: their tables, TOML files and rules."""
