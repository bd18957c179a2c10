"""Imports of other tools' configurations."""
