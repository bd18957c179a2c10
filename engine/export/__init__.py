"""Writes models from finished runs: merged adapters, and dense models assembled into a mixture of experts."""
