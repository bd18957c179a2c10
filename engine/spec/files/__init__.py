"""TOML files: found, read with line numbers, written back with their comments, shared."""
