"""Extras: each folder is one feature besides training, started by a command; nothing in the core imports it."""
