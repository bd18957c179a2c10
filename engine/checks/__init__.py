"""One list of rules: why a run cannot start, and what a user should know before it does."""
