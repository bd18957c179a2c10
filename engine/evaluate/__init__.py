"""Scores of a model: loss, generated answers and their exact match. Imports nothing of training."""
