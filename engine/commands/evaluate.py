"""`tunedeck eval`: scores a run's checkpoints, or a model, on held-out data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from engine.commands.completion import run_names
from engine.commands.harness import TaskResults, print_tasks, refuse_code_of_tasks, score_on_tasks, tasks_as_json
from engine.commands.shared import (
    JsonOption,
    OverridesOption,
    RunsOption,
    TrustOption,
    find_result_run,
    find_run,
    importing,
    make_console,
    prepare_libraries,
    print_json,
    print_progress,
    profile_option,
    recipe_option,
)
from engine.config.files.text import visible
from engine.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from engine.config.schema.run import RunSpec
    from engine.evaluate.scores import Scores
    from engine.journal.directory import RunDirectory


SHOWN_CHARACTERS = 80
"""Prompts and answers are cut on a screen; --json has all of each."""

MOST_CLASSES = 20
"""Labels whose precision and recall are printed."""


@dataclass(frozen=True)
class Asked:
    checkpoint: str | None = None
    base: bool = False
    overrides: tuple[str, ...] = ()
    scorer: str | None = None
    trust_remote_code: bool = False


class Scored(NamedTuple):
    target: str
    step: int | None
    """None for a model that is not a run; 0 for the model that a run started from."""
    scores: Scores


TargetsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|MODEL...", autocompletion=run_names, help="Runs, or with -p and -r: hub ids or model folders."
    ),
]
CheckpointsOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="STEP|best|all", help="Which checkpoints to score; by default the newest."),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, help="Score at most the first N samples.", show_default=False),
]
BaseOption = Annotated[bool, typer.Option("--base", help="Also score the base model of the run or adapter.")]
ScorerOption = Annotated[
    str | None,
    typer.Option(
        "--scorer", metavar="FILE.py:FUNCTION", help="Your own scoring function: f(answers, references) -> dict."
    ),
]
HarnessOption = Annotated[
    str | None,
    typer.Option("--harness", metavar="TASKS", help="Score public tasks of lm-eval instead: gsm8k,hellaswag."),
]
IncludeOption = Annotated[
    str | None, typer.Option("--include-path", metavar="DIR", help="With --harness: a folder with your own task files.")
]
AnswersOption = Annotated[
    Path | None, typer.Option("--answers", metavar="FILE", help="Write pairs of answers for a judge.")
]
VerdictsOption = Annotated[
    Path | None,
    typer.Option("--verdicts", metavar="FILE", help="Compute the win rate from the judge's verdicts on these pairs."),
]
ModelProfile = Annotated[str | None, profile_option("With MODEL: the hardware profile.")]
ModelRecipe = Annotated[str | None, recipe_option("With MODEL: the recipe whose validation data is used.")]


def evaluate(
    targets: TargetsArgument,
    checkpoint: CheckpointsOption = None,
    limit: LimitOption = None,
    base: BaseOption = False,
    scorer: ScorerOption = None,
    harness: HarnessOption = None,
    include_path: IncludeOption = None,
    answers: AnswersOption = None,
    verdicts: VerdictsOption = None,
    profile: ModelProfile = None,
    recipe: ModelRecipe = None,
    overrides: OverridesOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Score checkpoints of runs, or models, on held-out data. Scores of runs are saved, and compare shows them."""
    from engine.checks.machine import require_training_packages

    require_training_packages()
    sets = (*(overrides or []), *([f"evaluate.limit={limit}"] if limit else []))
    if harness is not None or include_path is not None:
        sets += tuple(harness_overrides(harness, include_path))
    asked = Asked(checkpoint, base, sets, scorer, trust_remote_code)
    if answers is not None or verdicts is not None:
        others = {"-p": profile, "-r": recipe, "--harness": harness, "--scorer": scorer}
        beside = [name for name, given in others.items() if given]
        _judge(targets, runs, asked, Judging(answers, verdicts), beside, as_json)
        return
    if profile or recipe:
        _refuse_runs(targets, runs)
        files = _both_files(targets[0], profile, recipe, checkpoint)
        results, tasks = _score_models(targets, *files, asked, only_tasks=harness is not None)
    else:
        results, tasks = _score_runs(targets, runs, asked, only_tasks=harness is not None)
    if as_json:
        print_json([*map(_as_json, results), *tasks_as_json(tasks)], indent=None)
        return
    if results:
        _print(results)
    if tasks:
        print_tasks(tasks)


def _score_models(
    targets: list[str], profile: str, recipe: str, asked: Asked, *, only_tasks: bool
) -> tuple[list[Scored], TaskResults]:
    from engine.checks.run import check_model

    specs = [found for target in targets for found in _model_specs(target, recipe, profile, asked)]
    for _, spec in specs:
        check_model(spec)
    refuse_code_of_tasks([each for each in specs if each[1].recipe.evaluate.harness])
    results = [] if only_tasks else [_score_model(name, spec, asked) for name, spec in specs]
    return results, _on_tasks([each for each in specs if each[1].recipe.evaluate.harness])


def _score_runs(
    targets: list[str], runs: Path | None, asked: Asked, *, only_tasks: bool
) -> tuple[list[Scored], TaskResults]:
    places = list(dict.fromkeys(_find_run(target, runs) for target in targets))
    with_tasks = [place for place in places if only_tasks or _names_tasks(place, asked.overrides)]
    if with_tasks:
        refuse_code_of_tasks(with_tasks, asked.overrides, trusted=asked.trust_remote_code)
    results = [] if only_tasks else [scored for place in places for scored in _score_run(place, asked)]
    return results, _on_tasks(with_tasks, asked)


class Judging(NamedTuple):
    answers: Path | None
    verdicts: Path | None


def _judge(
    targets: list[str], runs: Path | None, asked: Asked, files: Judging, beside: list[str], as_json: bool
) -> None:
    """Write the answers of a run for a judge, or score its verdicts on them. Raises UsageError for options that do not
    go with this."""
    command = "tunedeck eval RUN --answers FILE [--base] [--checkpoint STEP], then: tunedeck eval RUN --verdicts FILE"
    if files.answers is not None and files.verdicts is not None:
        beside = [*beside, "--answers"]
    if files.verdicts is not None:
        given = {"--checkpoint": asked.checkpoint, "--base": asked.base, "--set or --limit": asked.overrides}
        beside = [*beside, *(name for name, value in given.items() if value)]
    option = "--answers" if files.verdicts is None else "--verdicts"
    if beside or len(targets) > 1 or asked.checkpoint == "all":
        extra = ", ".join(beside) or ("several runs" if len(targets) > 1 else "--checkpoint all")
        raise UsageError(f"{extra} with {option}", expected="a single checkpoint of a single run", fix=command)
    place = _find_run(targets[0], runs)
    with importing():
        from engine.evaluate.run import score_verdicts_of, write_answers_to_judge
    if files.verdicts is not None:
        step, scores = score_verdicts_of(place, files.verdicts, print_progress)
        scored = Scored(place.name, step, scores)
        if as_json:
            print_json([_as_json(scored)], indent=None)
        else:
            _print([scored])
        return
    from engine.config.load import load_run_spec

    assert files.answers is not None
    prepare_libraries(load_run_spec(place.run_toml, own=True))
    judged = write_answers_to_judge(
        place, files.answers, asked.checkpoint, print_progress, base=asked.base, overrides=asked.overrides,
        trusted=asked.trust_remote_code,
    )  # fmt: skip
    facts = {"path": str(files.answers), "pairs": len(judged.ids), "step": judged.step, "against": judged.against}
    if as_json:
        print_json(facts)
        return
    name = shlex.quote(str(files.answers))
    make_console().print(
        f'{files.answers}: {len(judged.ids):,} pairs of answers, each in both orders. Add "winner": "a", "b" or "tie" '
        f"to each row, then: tunedeck eval {shlex.quote(targets[0])} --verdicts {name}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def _on_tasks(targets: Sequence[Any], asked: Asked | None = None) -> TaskResults:
    if not targets:
        return []
    if asked is None:
        return score_on_tasks(targets)
    return score_on_tasks(targets, asked.checkpoint, asked.overrides, trusted=asked.trust_remote_code)


def _names_tasks(place: RunDirectory, overrides: tuple[str, ...]) -> bool:
    """Whether the recipe, or a `--set`, names public tasks."""
    from engine.config.load import load_run_spec

    named = any(text.strip().startswith("evaluate.harness=") for text in overrides)
    return named or bool(load_run_spec(place.run_toml, own=True).recipe.evaluate.harness)


def harness_overrides(tasks: str | None, include: str | None) -> list[str]:
    """--harness and --include-path as `--set`. Raises UsageError for the second alone."""
    if tasks is None:
        raise UsageError("--include-path is for --harness", fix="add --harness TASK")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    folder = [f"evaluate.harness_include={json.dumps(str(Path(include).absolute()))}"] if include else []
    return [f"evaluate.harness={json.dumps(names)}", *folder]


def _both_files(target: str, profile: str | None, recipe: str | None, checkpoint: str | None) -> tuple[str, str]:
    """Raises UsageError if one is missing, or for `checkpoint`, which only a run has."""
    model = f"tunedeck eval {shlex.quote(target)} -p {profile or 'demo'} -r {recipe or 'demo'}"
    if profile is None or recipe is None:
        missing = [option for option, given in (("-p PROFILE", profile), ("-r RECIPE", recipe)) if given is None]
        raise UsageError(
            f"missing: {' and '.join(missing)}",
            expected="-p and -r with a MODEL; neither with a RUN, which uses its own settings",
            fix=model,
        )
    if checkpoint is not None:
        raise UsageError("--checkpoint needs a RUN, but -p and -r select a model", fix=model)
    return profile, recipe


def _refuse_runs(targets: Sequence[str], runs: Path | None) -> None:
    """Raises UsageError for a target that can only be a run: a short name may be a model of the hub."""
    from engine.journal.directory import RunDirectory
    from engine.journal.index import DIRECTORY_NAME

    for target in targets:
        if target != "last" and not DIRECTORY_NAME.match(target) and not RunDirectory(Path(target)).exists():
            continue
        try:
            find_run(target, runs)
        except UsageError:
            continue
        raise UsageError(
            f"{target} is a run and uses its own settings",
            expected="-p and -r only with a MODEL, such as the folder of a run's result",
            fix=f"tunedeck eval {shlex.quote(target)}",
        )


def _find_run(target: str, runs: Path | None) -> RunDirectory:
    """Raises UsageError, which names -p and -r if the target could be a model."""
    try:
        return find_result_run(target, runs)
    except UsageError as error:
        from engine.config.files.find import BUILTIN_PREFIX

        folder = Path(target)
        is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        if not target.startswith(BUILTIN_PREFIX) and target.count("/") != 1 and not is_model:
            raise
        raise UsageError(
            f"{target!r} is not a run; scoring a model needs -p PROFILE and -r RECIPE",
            fix=f"tunedeck eval {shlex.quote(target)} -p demo -r demo",
        ) from error


def _model_specs(target: str, recipe: str, profile: str, asked: Asked) -> list[tuple[str, RunSpec]]:
    """(name, run spec) of the model `target`; with --base, that of the model it was trained from comes first. Raises
    UsageError for --base if `target` is no adapter."""
    from engine.commands.model_specs import spec_for_base, spec_for_model

    settings, trusted = (recipe, profile, asked.overrides), asked.trust_remote_code
    found = [(target, spec_for_model(target, *settings, trust_remote_code=trusted))]
    if not asked.base:
        return found
    return [(f"{target}'s base", spec_for_base(target, *settings, "eval", trust_remote_code=trusted)), *found]


def _score_model(name: str, spec: RunSpec, asked: Asked) -> Scored:
    prepare_libraries(spec)
    with importing():
        from engine.evaluate.run import score_model
    return Scored(name, None, score_model(spec, print_progress, scorer=asked.scorer))


def _score_run(place: RunDirectory, asked: Asked) -> list[Scored]:
    from engine.config.load import load_run_spec

    prepare_libraries(load_run_spec(place.run_toml, own=True))
    with importing():
        from engine.evaluate.run import score_run
    found = score_run(
        place, asked.checkpoint, print_progress, base=asked.base, overrides=asked.overrides, scorer=asked.scorer,
        trusted=asked.trust_remote_code,
    )  # fmt: skip
    return [Scored(place.name, step, scores) for step, scores in found]


def _as_json(scored: Scored) -> dict[str, Any]:
    from engine.evaluate.scores import scores_as_json

    return {"target": scored.target, "step": scored.step, **scores_as_json(scored.scores)}


def _print(results: list[Scored]) -> None:
    """A row of metrics for each result, the classes of labels, notes, and the samples of the last result."""
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    names = list(dict.fromkeys(name for each in results for name in each.scores.metrics))
    several = len({each.target for each in results}) > 1
    table = Table(*(["model"] if several else []), "step", *names, "samples", box=None)
    for target, step, scores in results:
        values = [f"{scores.metrics[name]:.4f}" if name in scores.metrics else "-" for name in names]
        label = "-" if step is None else "base" if step == 0 else str(step)
        table.add_row(*([Text(visible(target))] if several else []), label, *values, str(scores.count))
    console.print(table)
    last = results[-1].scores
    if last.classes:
        console.print(_class_table(last.classes))
    for note in last.notes:
        console.print(note, soft_wrap=True)
    for sample in last.samples:
        # Text, not str: what a model writes must not be parsed as markup.
        prompt, answer, reference = (_short(sample[key]) for key in ("prompt", "answer", "reference"))
        console.print(Text(f"{prompt} -> {answer} (reference {reference})"), soft_wrap=True)


def _class_table(classes: dict[str, dict[str, float]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("label", "precision", "recall", "f1", "samples", box=None)
    shown = sorted(classes.items(), key=lambda row: -row[1]["count"])[:MOST_CLASSES]
    for label, row in shown:
        table.add_row(Text(_short(label)), *(f"{row[name]:.4f}" for name in ("precision", "recall", "f1")),
                      f"{row['count']:.0f}")  # fmt: skip
    if len(classes) > len(shown):
        table.add_row(f"and {len(classes) - len(shown)} more, in --json")
    return table


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS // 2]}...{shown[-16:]}"
