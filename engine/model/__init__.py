"""Loads models for training, computes their loss, and saves them: adapters, attention, dropout, dtypes, tokenizers."""
