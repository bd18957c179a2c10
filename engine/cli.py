"""The command line: gathers the commands, runs one, and turns every error into one short block and an exit code.

Commands parse, call and print; what they need from heavy rooms they import inside. `tunedeck --help` stays under 0.4 s
of CPU, so nothing here or in `engine.commands` imports torch, transformers, pydantic or the spec on the way.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated

import typer

from engine.commands import (
    compare,
    control,
    data,
    doctor,
    evaluate,
    export,
    launch,
    library,
    plan,
    queue,
    resume,
    runs,
    train,
)
from engine.errors import EnvironmentProblem, StoppedError, TunedeckError, UsageError

app = typer.Typer(
    name="tunedeck",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BAD_ARGUMENTS = typer.BadParameter.__mro__[1]
"""What typer raises for arguments that it cannot parse. It has no public name; its base is the parser's own error."""

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"tunedeck {version('tunedeck')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune language models without dying of memory."""


for room in (plan, train, resume, control, queue, launch, runs, compare, evaluate, export, data, library, doctor):
    room.register(app)


def run() -> None:
    """Run the command in `sys.argv`; exits the process with its code. `--debug` anywhere shows tracebacks."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        sys.exit(_run_command(arguments))
    except TunedeckError as error:
        if debug:
            traceback.print_exc()
        _complain(error.render())
        sys.exit(error.exit_code)
    except BAD_ARGUMENTS as error:
        _complain_of_arguments(error)
        sys.exit(UsageError.exit_code)
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`); the null device keeps the interpreter's last flush quiet.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            _complain_of_full_disk(error)
            sys.exit(EnvironmentProblem.exit_code)
        if debug:
            raise
        _complain(f"unexpected {type(error).__name__}: {error}\nfix: run again with --debug and report the traceback")
        sys.exit(1)


def _run_command(arguments: list[str]) -> int:
    """Run one command; returns its exit code. Calling `app` itself would turn a closed pipe into exit code 1."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("tunedeck", arguments) as context:
            command.invoke(context)
        code = 0
    except typer.Exit as ending:
        code = ending.exit_code
    except KeyboardInterrupt:
        code = StoppedError.exit_code
    sys.stdout.flush()  # here an error can still be told
    return code


def _complain_of_full_disk(error: OSError) -> None:
    place = error.filename or "standard output"
    _complain(EnvironmentProblem(f"{place} cannot be written: {error.strerror}", fix="make room on that disk").render())
    # What is still buffered cannot be written either; the null device keeps the interpreter's last flush quiet.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _complain_of_arguments(error: Exception) -> None:
    """The parser's complaint as one of our blocks; the help itself where a group was named without a command."""
    context, message = getattr(error, "ctx", None), error.format_message()
    if context is not None and message == context.get_help():
        sys.stderr.write(message + "\n")
        return
    command = context.command_path if context is not None else "tunedeck"
    _complain(UsageError(message, fix=f"{command} --help").render())


def _complain(text: str) -> None:
    """Write one block to stderr, each line as it is: never parsed as markup, control characters made visible."""
    from engine.spec.files.text import visible

    first, *rest = [visible(line) for line in text.splitlines()] or [""]
    sys.stderr.write("\n".join([f"tunedeck: {first}", *(f"  {line}" for line in rest)]) + "\n")
