"""Finds TOML files, reads them with line numbers, writes them back with their comments, and shares them."""
