"""Prepares a run's result for the tools that serve it, says with which line, and asks the tool itself for answers."""
