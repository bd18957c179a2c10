"""The `tunedeck` command: fixes the import path, then runs the command line (without arguments: its help).

The path comes first because the import packages are called `engine`, `tui` and `profiles`, names that a user's own
repository may well hold too: with `PYTHONPATH=.` or `python -m`, Python would import theirs. This file's folder goes to
the front of `sys.path` before anything else of Tunedeck is imported. Child processes are started through this file's
absolute path with `-P` (see `engine.start`), so the same holds there.

Try: `tunedeck --help`, or `python -m tunedeck --help`.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _own_packages_first() -> None:
    """Move this file's folder to the front of `sys.path`."""
    sys.path[:] = [HERE, *(entry for entry in sys.path if os.path.abspath(entry or ".") != HERE)]


def main() -> None:
    """Entry point of the `tunedeck` command. Exits with the codes of the command line (see `tunedeck --help`)."""
    _own_packages_first()
    from engine.cli import run

    run()


if __name__ == "__main__":
    main()
