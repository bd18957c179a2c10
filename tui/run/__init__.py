"""Following one run, listing many, formatting them as text, and starting their engine processes."""
