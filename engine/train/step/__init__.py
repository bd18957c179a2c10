"""One optimizer step as a transaction."""
