"""Models: loading, adapters, attention, dropout, the loss of tokens, saving."""
