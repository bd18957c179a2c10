"""`tunedeck models`: which known models a profile trains, by what method, at what length and predicted speed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import JsonOption, make_console, print_json, print_line, print_notices, print_progress

if TYPE_CHECKING:
    from engine.budget.advise.model_list import Answer, ListedModel
    from engine.config.files.find import SpecFile

WordArgument = Annotated[
    str,
    typer.Argument(
        metavar="[WORD]", help="Only list models whose name contains this word, such as qwen3.", show_default=False
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--profile",
        metavar="PROFILE",
        help="Plan for this profile; by default for the smallest shipped profile that fits.",
    ),
]
EveryOption = Annotated[bool, typer.Option("--all", help="Print a line for every profile and method.")]
SimulateOption = Annotated[
    bool,
    typer.Option(
        "--simulate", help="Simulate models without a memory formula; takes seconds to minutes per model, once."
    ),
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table used in the documentation.")]


def models(
    word: WordArgument = "",
    profile: ProfileOption = None,
    every: EveryOption = False,
    simulate: SimulateOption = False,
    as_json: JsonOption = False,
    as_markdown: MarkdownOption = False,
) -> None:
    """List known models and the profiles that train them. Also the methods, sequence lengths and speeds."""
    from engine.budget.advise.model_list import known_models, shipped_gpus
    from engine.config.files.find import find_spec_file
    from engine.config.load import load_spec_file
    from engine.errors import UsageError

    profiles = [find_spec_file("profile", profile)] if profile else shipped_gpus()
    for file in profiles:
        load_spec_file("profile", file)
    if not known_models(word):
        raise UsageError(
            f"no known model has {word!r} in its name",
            expected=f"one of the {len(known_models())} of tunedeck models",
            fix="other models that transformers loads can be planned by their id: tunedeck plan --set "
            "model.id=OWNER/NAME",
        )
    found = list(_listed(word, profiles, every=every or profile is not None, simulate=simulate))
    if as_json:
        print_json([asdict(model) for model in found])
    elif as_markdown:
        print_line(markdown_table(found))
    elif every:
        _print_every(found)
    else:
        _print_table(found)
    if not as_json and not simulate:
        print_notices(_missing(found))


def _listed(word: str, profiles: Sequence[SpecFile], *, every: bool, simulate: bool) -> Iterator[ListedModel]:
    from engine.budget.advise.model_list import known_models, list_model
    from engine.launch.other_processes import with_simulations

    known = known_models(word)
    for number, (name, entry) in enumerate(known, 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kplanning {name}, {number} of {len(known)}")
            sys.stderr.flush()
        ask = partial(list_model, name, entry, profiles, every=every, simulate=simulate)
        yield with_simulations(ask, print_progress)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


def _missing(found: Sequence[ListedModel]) -> list[str]:
    from engine.budget.advise.model_list import NOT_SIMULATED

    names = [model.name for model in found if any(answer.reason == NOT_SIMULATED for answer in model.answers)]
    if not names:
        return []
    return [
        f"of {len(names)} models need a simulated step first, which takes seconds to minutes each: tunedeck "
        f"models {names[0]} --simulate"
    ]


def _print_table(found: Sequence[ListedModel]) -> None:
    """A line for each model, with the smallest profile that trains it by each method."""
    from engine.budget.advise.model_list import RECIPES
    from engine.journal.event_text import clean

    table = _table("model", *RECIPES)
    for model in found:
        table.add_row(model.name, *(clean(" ".join(cells(model, method))) for method in RECIPES))
    make_console().print(table)
    if len(found) == 1:
        print_line(f"any of {', '.join(found[0].ids)}; every profile: tunedeck models {found[0].name} --all")
    print_line("smallest profile, longest sequence, tokens/s at 2k" + _marks(found))


def _marks(found: Sequence[ListedModel]) -> str:
    """What the signs in the table mean, of those that are in it."""
    text = " ".join(" ".join(cells(model, method)) for model in found for method in _methods()).split()
    signs = {"-": "speed not predicted", "?": "not simulated on this machine yet", "no": "none of these profiles"}
    starred = "; *: offloads to the host" if any(word.endswith("*") for word in text) else ""
    return "".join(f"; {sign}: {meaning}" for sign, meaning in signs.items() if sign in text) + starred


def _methods() -> Iterable[str]:
    from engine.budget.advise.model_list import RECIPES

    return RECIPES


def _print_every(found: Sequence[ListedModel]) -> None:
    from engine.journal.event_text import clean

    titles = ("model", "method", "profile", "verdict", "micro-batch", "longest", "tokens/s", "peak GiB", "note")
    table = _table(*titles)
    for model in found:
        for answer in model.answers:
            peak = f"{answer.peak_bytes / 2**30:.1f}" if answer.peak_bytes is not None else ""
            verdict = "trains" if answer.trains else "no plan" if answer.reason else "does not fit"
            rows = str(answer.micro_batch) if answer.trains else ""
            figures = (rows, _thousands(answer.longest), _speed(answer), peak)
            table.add_row(model.name, answer.method, clean(answer.profile), verdict, *figures, clean(_note(answer)))
    make_console().print(table)


def _table(*titles: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def markdown_table(found: Sequence[ListedModel]) -> str:
    """As in docs/models.md."""
    from engine.budget.advise.model_list import RECIPES

    lines = [f"| model | {' | '.join(RECIPES)} |", "|---" * (len(RECIPES) + 1) + "|"]
    for model in found:
        ids = "<br>".join(f"`{name}`" for name in model.ids)
        lines.append(f"| {ids} | {' | '.join(', '.join(cells(model, method)) for method in RECIPES)} |")
    return "\n".join(lines)


def cells(model: ListedModel, method: str) -> list[str]:
    """Profile, longest sequence and speed; one word where no profile trains the model."""
    from engine.budget.advise.model_list import NOT_SIMULATED

    best = model.best(method)
    if best is not None:
        length = _thousands(best.longest)
        return [f"{best.profile}{'*' if best.offloads else ''}", length, _speed(best)]
    reasons = {answer.reason for answer in model.answers if answer.method == method}
    return ["?" if NOT_SIMULATED in reasons else "no"]


def _thousands(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens // 1024}k"


def _speed(answer: Answer) -> str:
    return "-" if answer.tokens_per_second is None else f"{answer.tokens_per_second:,.0f}"


def _note(answer: Answer) -> str:
    from engine.budget.advise.model_list import NOT_SIMULATED
    from engine.commands.plan_text import toml_text

    if answer.reason is not None:
        return "not simulated yet: --simulate" if answer.reason == NOT_SIMULATED else answer.reason
    return ", ".join(f"{key} = {toml_text(value)}" for key, value in (answer.settings or {}).items())
