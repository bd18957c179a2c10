"""The command line for the tests of launchers."""

from tests.cli.conftest import tunedeck

__all__ = ["tunedeck"]
