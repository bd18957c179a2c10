"""Editing TOML: the highlighting of its syntax, and the completion of keys and values from the schema."""
