"""Writes models from finished runs: merges an adapter into its base model, and assembles dense models into a mixture of
experts."""
