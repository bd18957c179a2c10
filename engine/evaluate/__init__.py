"""Scores of models: the loss, generated answers, and their match with the references."""
