"""Scores of a model: loss and generated answers, inside training and after it."""
