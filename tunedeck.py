"""The `tunedeck` command: fixes the import path, then opens the console or runs a command.

The path comes first because the import packages are called `engine`, `tui` and `profiles`, and a user's repository may
have packages of these names: with `PYTHONPATH=.` or `python -m`, Python would import those. This file's folder goes to
the front of `sys.path` before any other module of Tunedeck is imported. Child processes start through this file's
absolute path with `-P` (see `engine.launch.process`), so the same holds for them.

Try: `tunedeck`, `tunedeck --help`, or `python -m tunedeck --help`.
"""

import gc
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _own_packages_first() -> None:
    """Move this file's folder to the front of `sys.path`."""
    sys.path[:] = [HERE, *(entry for entry in sys.path if os.path.abspath(entry or ".") != HERE)]


def main() -> None:
    """Entry point of the `tunedeck` command. Exits with the codes of the command line (see `tunedeck --help`).

    Without a command the console is opened, without importing the command line; where there is no terminal, the help is
    printed.
    """
    _own_packages_first()
    from tui.arguments import on_a_terminal, parse, without_flags

    sys.argv[1:] = without_flags(sys.argv[1:])
    flags = parse(sys.argv[1:])
    completes = "_TUNEDECK_COMPLETE" in os.environ  # the shell asks which words may come next
    if flags is not None and not completes and (sys.argv[1:] or on_a_terminal()):
        # Until the first screen is painted almost nothing becomes garbage: looking for it took a tenth of that time.
        gc.disable()
        from tui.app import run as open_console

        open_console(flags)
    from engine.cli import run

    run()


if __name__ == "__main__":
    main()
