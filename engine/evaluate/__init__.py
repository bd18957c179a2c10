"""Scores models: loss, generated answers and their exact match with the references. Imports no code of training."""
