"""Extras: each folder is one feature beside training. A command starts it; nothing in the core imports it."""
