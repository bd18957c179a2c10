"""Exports of a finished run: merging an adapter into its base model."""
