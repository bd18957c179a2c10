"""The screens of the console, one file each; `table.py` lists them."""
