"""`python -m tunedeck` where Tunedeck is installed; in a checkout `tunedeck.py` answers that itself.

This folder holds what only the installed package has: the wheel puts its files into `tunedeck/`, beside `engine`, `tui`
and `profiles`, and `tunedeck.py` becomes `tunedeck/__init__.py` (see `hatch_build.py`). No code of the program belongs
here.

Try: `python -m tunedeck --version`.
"""

from tunedeck import main

main()
