"""Profile and recipe files: listing them, writing new ones, and showing their text with the checker's problems."""
