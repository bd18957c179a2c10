"""The `tunedeck` command: fixes the import path, then opens the console or runs a command.

The path comes first because the import packages are called `engine`, `tui` and `profiles`, and a user's repository may
have packages of these names: with `PYTHONPATH=.` or `python -m`, Python would import those. This file's folder goes to
the front of `sys.path` before any other module of Tunedeck is imported. Child processes start through this file's
absolute path with `-P` (see `engine.launch.process`), so the same holds for them.

Try: `tunedeck`, `tunedeck --help`, or `python -m tunedeck --help`.
"""

import gc
import io
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _own_packages_first() -> None:
    """Move this file's folder to the front of `sys.path`."""
    sys.path[:] = [HERE, *(entry for entry in sys.path if os.path.abspath(entry or ".") != HERE)]


AGAIN = "tunedeck"
"""Python's option -X of a process that `_in_utf8` has started again."""


def _in_utf8() -> None:
    """In a locale without UTF-8, such as LC_ALL=C with PYTHONUTF8=0, start again in Python's UTF-8 mode: names of files
    and of models hold any character. What the terminal cannot show is replaced there."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", "-X", AGAIN, *sys.orig_argv[1:]])
    encoding = None
    if AGAIN in sys._xoptions:
        os.environ["PYTHONUTF8"] = "1"  # for processes that this one starts
        encoding = None if "PYTHONIOENCODING" in os.environ else _locale_encoding()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            errors = "backslashreplace" if (encoding or stream.encoding) == "utf-8" else "replace"
            if encoding is not None or stream.errors != errors:
                stream.reconfigure(encoding=encoding, errors=errors)


def _locale_encoding() -> str:
    """Return the encoding that the user's locale names, also in UTF-8 mode; UTF-8 for one that Python does not know."""
    import codecs
    import locale

    try:
        return codecs.lookup(locale.getencoding()).name
    except LookupError:
        return "utf-8"


def main() -> None:
    """Entry point of the `tunedeck` command. Exits with the codes of the command line (see `tunedeck --help`).

    Without a command the console is opened, without importing the command line; where there is no terminal, the help is
    printed.
    """
    _in_utf8()
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
