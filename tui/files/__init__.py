"""Profile and recipe files: the list of them, where the console writes them, and their text with its problems."""
