"""What commands share: option types, output as text or JSON, and the import of the heavy libraries."""

from __future__ import annotations

import atexit
import errno
import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from engine.commands.completion import profile_names, recipe_names, run_names
from engine.config.files.text import visible
from engine.launch.start_options import StartOptions

if TYPE_CHECKING:
    from rich.console import Console

    from engine.config.schema.run import RunSpec
    from engine.journal.directory import RunDirectory


PROFILE_HELP = "Hardware profile: a name, or a path to a TOML file."
RECIPE_HELP = "Recipe: a name, or a path to a TOML file."


def profile_option(help_text: str = PROFILE_HELP, *, required: bool = False) -> Any:
    """-p, with the names of profiles for a shell to complete."""
    return typer.Option(
        "-p", "--profile", metavar="PROFILE", autocompletion=profile_names, help=help_text, show_default=not required
    )


def recipe_option(help_text: str = RECIPE_HELP, *, required: bool = False) -> Any:
    """-r, with the names of recipes for a shell to complete."""
    return typer.Option(
        "-r", "--recipe", metavar="RECIPE", autocompletion=recipe_names, help=help_text, show_default=not required
    )


ProfileOption = Annotated[str, profile_option(required=True)]
RecipeOption = Annotated[str, recipe_option(required=True)]
OptionalProfile = Annotated[str | None, profile_option()]
OptionalRecipe = Annotated[str | None, recipe_option()]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="K=V", help="Override a recipe key, such as train.learning_rate=1e-4.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


def _choose_runs(context: typer.Context, given: Path | None) -> Path | None:
    """Let --runs stand for $TUNEDECK_RUNS in this command and the processes it starts: a recipe's "run:NAME" is found
    there, too."""
    if given is not None:
        earlier = os.environ.get("TUNEDECK_RUNS")
        os.environ["TUNEDECK_RUNS"] = str(given.expanduser().absolute())
        context.call_on_close(lambda: _restore_runs(earlier))
    return given


def _restore_runs(earlier: str | None) -> None:
    os.environ.pop("TUNEDECK_RUNS", None)
    if earlier is not None:
        os.environ["TUNEDECK_RUNS"] = earlier


RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Folder of runs; by default $TUNEDECK_RUNS or ./runs.",
        show_default=False,
        callback=_choose_runs,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=run_names,
        help="A path, a run's name, a unique prefix, or 'last'.",
        show_default=False,
    ),
]
RunSpecOption = Annotated[
    Path | None, typer.Option("--run-spec", metavar="F", help="Repeat the run of this run.toml, in place of -p and -r.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Name of the run; by default the recipe's name.")
]
DevicesOption = Annotated[str | None, typer.Option("--devices", metavar="2,3", help="Indices of the devices to use.")]
WaitOption = Annotated[
    float | None, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait up to this long for a busy device.")
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return once the run has started.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Start with the settings as written, even if the plan says it does not fit.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a hub model.")]
MaxHoursOption = Annotated[
    float | None, typer.Option("--max-hours", metavar="H", min=0, help="Write a checkpoint and stop after H hours.")
]
OnFinishOption = Annotated[
    str | None, typer.Option("--on-finish", metavar="CMD", help="Shell command to run after the run has ended.")
]


START_OPTIONS: dict[str, Any] = {
    "profile": OptionalProfile,
    "recipe": OptionalRecipe,
    "overrides": OverridesOption,
    "name": NameOption,
    "devices": DevicesOption,
    "wait": WaitOption,
    "detach": DetachOption,
    "force": ForceOption,
    "as_json": JsonOption,
    "run_spec": RunSpecOption,
    "trust_remote_code": TrustOption,
    "max_hours": MaxHoursOption,
    "on_finish": OnFinishOption,
    "runs": RunsOption,
}
"""The option of each field of StartOptions, in the order of `train --help`."""


def takes_start_options(*names: str, **replaced: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names`, in this order in its --help. Those that are parameters of the command reach
    it by their names, all others in one StartOptions, its parameter `options`.

    `replaced`: other types for some of START_OPTIONS; one of plain `str` is required.
    """
    types = {**START_OPTIONS, **replaced}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own["options"]
        shared = [name for name in names if name not in own]
        made = {name: _parameter(name, types[name]) for name in shared}
        parameters = [{**own, **made}[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]

        @wraps(command)
        def run(**given: Any) -> None:
            options = StartOptions(**{name: given.pop(name) for name in shared})
            command(options=options, **given)

        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    required = get_args(annotation)[0] is str
    default = inspect.Parameter.empty if required else getattr(StartOptions, name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def runs_folder(given: Path | None) -> Path:
    """`given` (--runs), else $TUNEDECK_RUNS, else ./runs. Absolute."""
    from engine.journal.index import runs_folder as find_folder

    return find_folder(given)


def find_result_run(run: str, runs: Path | None) -> RunDirectory:
    """The run, or of a staged run the stage whose result is the run's. Raises UsageError if no run matches, several do,
    or that stage has not begun."""
    from engine.journal.stages import result_run

    return result_run(find_run(run, runs))


def find_run(run: str, runs: Path | None) -> RunDirectory:
    """Return the run; with `runs` (--runs), one of that folder. Raises UsageError if no run matches, or several do."""
    from engine.journal.index import resolve_run

    return resolve_run(run, runs_folder(runs), only_there=runs is not None)


def print_text(text: str, *, error: bool = False) -> None:
    """Write a text as a command prints it, to standard output or error: all text of commands goes through here, because
    any of it may quote a file of somebody else. Line breaks and tabs stay, other control characters become visible."""
    (sys.stderr if error else sys.stdout).write(visible(text, keep="\n\t"))


def print_line(text: str) -> None:
    """Print a line of a result."""
    print_text(text + "\n")


def print_json(document: object, *, indent: int | None = 2) -> None:
    """Print JSON in ASCII."""
    print_text(json.dumps(document, indent=indent).replace("\x7f", "\\u007f") + "\n")


def print_progress(text: str) -> None:
    """Say on standard error what a command is doing; standard output is for results."""
    print_text(text + "\n", error=True)


def print_notices(notices: Iterable[str]) -> None:
    """Print notices on standard error; standard output is for results."""
    for notice in notices:
        print_progress(f"tunedeck: {notice}")


ENDLESS = 4096
"""Columns of a table in a pipe or file: nothing is wrapped or cut, because a script reads it."""


def make_console(*, soft_wrap: bool = False) -> Console:
    """A console that reads no markup, makes control characters visible, raises BrokenPipeError, and wraps no line in a
    pipe; with `soft_wrap` nowhere."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            """rich would end the process: a command that follows a run has to detach first."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Yield the segments of a renderable as `print_text` writes a text."""
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text, keep="\n\t"), style, control)

    width = None if sys.stdout.isatty() else ENDLESS
    return PipeConsole(markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap, width=width)


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Wrapped on a terminal, else one line per row, so that paths are not broken."""
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        print_text("".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    make_console().print(table)


LEAST_COLUMN = 6
"""Cells of a column that is folded because the terminal is narrow."""


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print columns; those whose titles are in `right` are aligned right. The first column, from which names are
    copied, is never broken; on a narrow terminal the widest of the others are folded. rich would take a second for 500
    rows."""
    from rich.cells import cell_len, chop_cells
    from rich.text import Text

    console = make_console(soft_wrap=True)
    sizes = [max(cell_len(row[number]) for row in (titles, *rows)) for number in range(len(titles))]
    while sum(sizes) + 2 * (len(sizes) - 1) > console.width and max(sizes[1:]) > LEAST_COLUMN:
        sizes[1 + sizes[1:].index(max(sizes[1:]))] -= 1

    def lines(row: Sequence[str]) -> Iterator[str]:
        folded = [
            chop_cells(cell, size) if cell_len(cell) > size else [cell] for cell, size in zip(row, sizes, strict=True)
        ]
        for parts in zip_longest(*folded, fillvalue=""):
            gaps = [" " * (size - cell_len(part)) for part, size in zip(parts, sizes, strict=True)]
            yield "  ".join(
                gap + part if title in right else part + gap
                for title, part, gap in zip(titles, parts, gaps, strict=True)
            ).rstrip()

    for line in lines(titles):
        console.print(Text(line, style="bold"))
    for row in rows:
        for line in lines(row):
            print_line(line)


@contextmanager
def importing() -> Iterator[None]:
    """Inside the block no garbage is collected; later collections leave out the objects created there: torch,
    transformers and what they import make 400,000 that are never freed. It took 1.3 s of the 4.8 s of the
    engine's imports to collect, and 0.3 s for each full collection of a run. Raises EnvironmentProblem if packages
    for training are not installed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        from engine.checks.machine import require_training_packages

        require_training_packages()
        yield
    finally:
        gc.freeze()
        atexit.register(unfreeze_for_triton)
        if enabled:
            gc.enable()


def unfreeze_for_triton() -> None:
    """At exit: Triton, from 3.9 on, prints 25 lines about its own objects that were never collected. To collect all
    takes half a second, so nothing is done for others."""
    from engine.config.files.machine import installed, older

    if "triton" in sys.modules and not older(installed("triton"), "3.9"):
        gc.unfreeze()


def prepare_libraries(spec: RunSpec) -> None:
    """Set variables for the devices before torch is imported; turn off the libraries' progress bars and warnings."""
    from engine.launch.environment import set_device_environment

    set_device_environment(spec)
    with importing():
        from engine.model.config import silence_libraries
    silence_libraries()
