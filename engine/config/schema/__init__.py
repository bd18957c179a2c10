"""The tables of profile, recipe and run files, and what each key allows."""
