"""The command line: the table of commands, and errors as one short block with an exit code.

`tunedeck --help` stays under 0.4 s of processor time: nothing here or at the top of a file in `engine.commands` imports
torch, transformers or pydantic.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from engine.commands import (
    background,
    chat,
    compare,
    data,
    doctor,
    doctor_gpus,
    evaluate,
    handover,
    json_schemas,
    launch,
    library,
    models,
    plan,
    queue,
    runs,
    share,
    train,
)
from engine.errors import StoppedError, TunedeckError, UsageError, disk_problem, moved_problem

SECTIONS = {
    "Before a run": ("plan", "advise", "data", "profiles", "recipes", "models", "doctor"),
    "Train": ("train", "resume", "stop", "pause", "checkpoint", "wait", "queue", "launch"),
    "Look": ("runs", "show", "watch", "log", "compare", "tag", "rename", "rm", "schema"),
    "After a run": ("eval", "chat", "merge", "handover", "push", "export", "import", "sync", "report"),
}
"""The commands in the order of `tunedeck --help`; one that is not named here comes last, under "More"."""

COMPLETION = "_TUNEDECK_COMPLETE"
"""Set by the shell's completion script, which asks for the words that may come next."""


class SectionedHelp(TyperGroup):
    """A group of commands whose help lists them by SECTIONS."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands that are not hidden, section by section."""
        shown = {name: found for name in self.list_commands(ctx)
                 if (found := self.get_command(ctx, name)) is not None and not found.hidden}  # fmt: skip
        named = {name for names in SECTIONS.values() for name in names}
        sections = {**SECTIONS, "More": tuple(name for name in shown if name not in named)}
        width = max(map(len, shown))
        for title, names in sections.items():
            rows = [(name.ljust(width), shown[name].get_short_help_str(formatter.width - 6 - width))
                    for name in names if name in shown]  # fmt: skip
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


app = typer.Typer(
    name="tunedeck",
    cls=SectionedHelp,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BAD_ARGUMENTS = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The base of BadParameter, which has no public name: what typer raises for arguments that it cannot parse."""


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        sys.stdout.write(f"tunedeck {version('tunedeck')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune language models with runs that survive out-of-memory errors.

    Without a command, tunedeck opens the console on a terminal. Its options:

    \b
      -p, --profile PROFILE    open the Launch screen with this profile
      -r, --recipe RECIPE      open the Launch screen with this recipe
      --set KEY=VALUE          open the Launch screen with this setting
      --runs DIR               folder of runs; by default $TUNEDECK_RUNS or ./runs
      --theme dark|light|ansi  colours
      --ascii                  draw without special characters
    """


def _add(*commands: Callable[..., None]) -> None:
    for command in commands:
        app.command()(command)


_add(plan.plan, plan.advise, train.train, train.resume, runs.stop, runs.pause, runs.checkpoint, runs.wait)
app.add_typer(queue.queue, name="queue")
_add(launch.launch, runs.runs, runs.show, runs.log, runs.watch, runs.rm, runs.rename, runs.tag, compare.compare)
app.command("eval")(evaluate.evaluate)
_add(chat.chat, background.sync, handover.merge, handover.handover, handover.push, data.data)
app.add_typer(
    library.make_group("profile", "Hardware profiles: which device, and how much of it to use."), name="profiles"
)
app.add_typer(library.make_group("recipe", "Recipes: the model, the data, and how it is trained."), name="recipes")
_add(models.models, share.export, doctor.doctor, share.report)
app.command("import")(share.import_archive)
app.command("schema")(json_schemas.schema)
# Old names.
app.command("fit", hidden=True)(plan.fit)
app.command("forward", hidden=True)(background.forward)
# Processes that other commands start.
app.command("_engine", hidden=True)(train.engine_process)
app.command("_assemble", hidden=True)(train.assembler_process)
app.command("_conductor", hidden=True)(train.conductor_process)
app.command("_simulate", hidden=True)(background.simulate_process)
app.command("_prove", hidden=True)(doctor_gpus.prove_process)
app.command("_forward", hidden=True)(background.tracker_process)
app.command("_tell", hidden=True)(background.webhook_process)
app.command("_chat", hidden=True)(chat.chat_process)
app.command("_view", hidden=True)(train.view_process)
app.command("_queue_worker", hidden=True)(queue.queue_worker)


def run() -> None:
    """`--debug` anywhere in `sys.argv` shows tracebacks."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        sys.exit(_run_command(arguments))
    except TunedeckError as error:
        if debug:
            traceback.print_exc()
        _print_error(error.render())
        sys.exit(error.exit_code)
    except BAD_ARGUMENTS as error:
        _print_bad_arguments(error, arguments)
        sys.exit(UsageError.exit_code)
    except BrokenPipeError:
        _discard_stdout()  # its reader is gone, as after `| head`
        sys.exit(0)
    except Exception as error:  # of any kind: a user gets a sentence, and the traceback with --debug
        problem = disk_problem(error, "standard output") or moved_problem(error)
        if problem is not None and not debug:
            _print_error(problem.render())
            _discard_stdout()  # what is still buffered cannot be written either
            sys.exit(problem.exit_code)
        if debug:
            raise
        _print_error(f"unexpected {type(error).__name__}: {error}\nfix: run again with --debug; report the traceback")
        sys.exit(1)


def _run_command(arguments: list[str]) -> int:
    """Calling `app` itself would turn a closed pipe into exit code 1."""
    command = typer.main.get_command(app)
    if COMPLETION in os.environ:
        command.main(arguments, prog_name="tunedeck")  # prints the words and exits
    try:
        with command.make_context("tunedeck", list(arguments)) as context:
            command.invoke(context)
        code = 0
    except typer.Exit as ending:
        code = ending.exit_code
    except KeyboardInterrupt:
        code = StoppedError.exit_code
    sys.stdout.flush()  # an error of this flush can still be reported
    return code


def _discard_stdout() -> None:
    """After a pipe was closed, so that the interpreter's last flush cannot fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _print_bad_arguments(error: typer.BadParameter, arguments: list[str]) -> None:
    """Print an error block, or the help if `arguments` name a group without a command."""
    from engine.commands.wrong_usage import refusal

    message = error.format_message()
    if error.ctx is not None and message == error.ctx.get_help():
        sys.stderr.write(message + "\n")
        return
    command = error.ctx.command_path if error.ctx is not None else "tunedeck"
    _print_error(refusal(message, arguments, command).render())


def _print_error(text: str) -> None:
    """Control characters are made visible."""
    from engine.config.files.text import visible

    first, *rest = [visible(line) for line in text.splitlines()] or [""]
    sys.stderr.write("\n".join([f"tunedeck: {first}", *(f"  {line}" for line in rest)]) + "\n")
