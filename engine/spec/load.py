"""From names, paths and `--set` to one run spec, and from a run spec to `run.toml` and back.

Precedence: defaults < recipe < stage < profile [overrides] < --set. Stages stay tables here; they beat the recipe when
a stage starts, and are beaten by what the profile and the command line say.

Try: `python -c "from engine.spec.load import resolve; print(resolve('demo', 'demo').spec.recipe.train)"`
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit

from engine.errors import SpecError
from engine.spec.check.check import check_table
from engine.spec.check.hardware_rules import problems_on_device
from engine.spec.check.overrides import apply_overrides, leaf_items, parse_overrides, set_value
from engine.spec.files.document import Document, Problem, parse_document, read_document, value_at
from engine.spec.files.find import SpecFile, SpecKind, find_spec_file
from engine.spec.files.paths import make_absolute
from engine.spec.files.text import quoted
from engine.spec.files.working_directory import working_directory
from engine.spec.schema import describe
from engine.spec.schema.base import Table
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe
from engine.spec.schema.run import Limits, Provenance, RunSpec

SPEC_TABLES: dict[SpecKind, type[Profile] | type[Recipe]] = {"profile": Profile, "recipe": Recipe}

PACKAGES = ("tunedeck", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")
"""What touches the numbers of a run."""

LEARNING_NEUTRAL_KEYS = (
    "train.micro_batch",
    "train.gradient_checkpointing",
    "train.activation_offload",
    "train.optimizer_offload",
    "train.compile",
    "train.loss",
    "train.log_every_steps",
    "train.deterministic",
    "model.attention",
    "data.workers",
    "eval.every_steps",
    "eval.at_start",
    "eval.limit",
    "eval.samples",
    "checkpoint.every_steps",
    "checkpoint.every_minutes",
    "checkpoint.keep",
    "evaluate",
    "generate",
    "trackers",
    "finish",
    "backoff.ladder",
    "backoff.grow",
    "moe.watch_experts",
)
"""Keys a profile may set without a word: memory, speed and record keeping."""


@dataclass(frozen=True)
class Resolved:
    """A run spec, and what the user should be told about how it came to be."""

    spec: RunSpec
    notices: list[str]


def load_spec_file(kind: SpecKind, located: SpecFile, *, any_stem: bool = False) -> Table:
    """One profile or recipe on its own. Raises SpecError with every problem of the file."""
    document = read_document(located.path)
    table, problems = check_table(SPEC_TABLES[kind], document.data)
    problems += [] if any_stem else _name_problems(document, located.path.stem)
    if problems or table is None:
        raise SpecError(document.refuse(problems))
    return table


def check_text(kind: SpecKind, text: str, stem: str, label: str) -> list[str]:
    """What is wrong with a text that is to become the file STEM.toml, each problem as `label:line: ...`."""
    try:
        document = parse_document(text, label)
    except SpecError as error:
        return error.problems
    _, problems = check_table(SPEC_TABLES[kind], document.data)
    return document.refuse([*problems, *_name_problems(document, stem)])


def _name_problems(document: Document, stem: str) -> list[Problem]:
    name = document.data.get("name")
    if isinstance(name, str) and name != stem and re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        return [Problem(("name",), quoted(name), f"it equals the file's name: {quoted(stem)}")]
    return []


def resolve(
    profile: str,
    recipe: str,
    sets: Sequence[str] = (),
    *,
    name: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    cwd: Path | None = None,
) -> Resolved:
    """The run spec of a profile, a recipe and overrides. Raises SpecError with the problems of all three at once."""
    here = (cwd or working_directory()).absolute()
    profile_file, recipe_file = _collect_problems(
        lambda: find_spec_file("profile", profile, here), lambda: find_spec_file("recipe", recipe, here)
    )
    profile_document, recipe_document = _collect_problems(
        lambda: read_document(profile_file.path), lambda: read_document(recipe_file.path)
    )
    wrong_names = [
        line
        for document, file in ((profile_document, profile_file), (recipe_document, recipe_file))
        for line in document.refuse(_name_problems(document, file.path.stem))
    ]
    provenance = Provenance.model_validate(
        {
            "profile_file": profile_file.label,
            "profile_sha256": profile_document.sha256,
            "recipe_file": recipe_file.label,
            "recipe_sha256": recipe_document.sha256,
            "set": list(sets),
            "versions": dict(_versions()),
        }
    )
    return _assemble(
        profile_document, recipe_document, sets, wrong_names, recipe_file.folder, here, name, limits, provenance
    )


def override(
    spec: RunSpec,
    sets: Sequence[str],
    *,
    profile: str | None = None,
    limits: Limits | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """The run spec with more `--set` on top and, where given, another profile: what `resume` continues with."""
    here = (cwd or working_directory()).absolute()
    written = spec.model_dump(by_alias=True, exclude_none=True)
    provenance, changed = written["provenance"], {"set": [*spec.provenance.set_, *sets], "versions": dict(_versions())}
    profile_document = Document("run.toml", written["profile"])
    if profile is not None:
        located = find_spec_file("profile", profile, here)
        profile_document = read_document(located.path)
        changed |= {"profile_file": located.label, "profile_sha256": profile_document.sha256}
    else:
        profile_document.data.pop("overrides", None)
    resolved = _assemble(
        profile_document,
        Document("run.toml", written["recipe"]),
        sets,
        [],
        here,
        here,
        spec.name,
        limits or spec.limits,
        Provenance.model_validate({**provenance, **changed}),
    )
    if profile is not None:
        return resolved
    kept = resolved.spec.profile.model_copy(update={"overrides": spec.profile.overrides})
    return Resolved(resolved.spec.model_copy(update={"profile": kept}), resolved.notices)


def _collect_problems(first: Any, second: Any) -> tuple[Any, Any]:
    """Both results, or one SpecError with the problems of both."""
    results, problems, fixes = [], [], []
    for attempt in (first, second):
        try:
            results.append(attempt())
        except SpecError as error:
            problems += error.problems
            fixes.append(error.fix)
    if problems:
        raise SpecError(problems, fix=next((fix for fix in fixes if fix), ""))
    return results[0], results[1]


def _assemble(
    profile: Document,
    recipe: Document,
    sets: Sequence[str],
    problems: list[str],
    folder: Path,
    cwd: Path,
    name: str | None,
    limits: Limits,
    provenance: Provenance,
) -> Resolved:
    """Lay the layers, check the whole, make paths absolute."""
    overrides, set_problems = parse_overrides(sets)
    notices = _apply_profile_overrides(profile, recipe, {".".join(override.key) for override in overrides})
    problems = [*problems, *set_problems, *apply_overrides(profile, recipe, overrides)]
    checked_profile, profile_problems = check_table(Profile, profile.data)
    checked_recipe, recipe_problems = check_table(Recipe, recipe.data)
    if checked_profile is not None and checked_recipe is not None:
        recipe_problems += problems_on_device(checked_profile, checked_recipe)
    problems += profile.refuse(profile_problems) + recipe.refuse(recipe_problems) + _run_name_problems(name)
    if problems or checked_profile is None or checked_recipe is None:
        raise SpecError(list(dict.fromkeys(problems)))
    make_absolute(recipe, folder, cwd)
    notes = checked_recipe.model_dump(include={"title", "notes"})
    with_paths = Recipe.model_validate({**recipe.data, **notes})
    run_name = name or checked_recipe.name
    parts = {"profile": checked_profile, "recipe": with_paths, "provenance": provenance, "limits": limits}
    return Resolved(RunSpec.model_validate({"name": run_name, **parts}), notices)


def _run_name_problems(name: str | None) -> list[str]:
    if name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        return []
    return [
        f"--name {quoted(name)}: letters, digits, '.', '_' and '-' are allowed, the first a letter or digit, 80 at most"
    ]


def _apply_profile_overrides(profile: Document, recipe: Document, on_command_line: set[str]) -> list[str]:
    """Lay the profile's [overrides] over the recipe; a notice for each that changes what is learned."""
    table = profile.data.get("overrides")
    notices = []
    for key, value in leaf_items(table) if isinstance(table, dict) else ():
        dotted = ".".join(key)
        before = value_at(recipe.data, key)
        before = _default(key) if before is None else before
        if describe.type_at(Recipe, key) is None:
            continue  # an unknown key is reported at its line in the profile
        set_value(recipe, key, value, profile.written_at(("overrides", *key)))
        silent = dotted.startswith(LEARNING_NEUTRAL_KEYS) or dotted in on_command_line
        if value != before and not silent:
            was = "unset" if before is None else quoted(before)
            notices.append(f"the profile sets {dotted} = {quoted(value)} (was {was}): this changes what is learned")
    return notices


def _default(key: tuple[str, ...]) -> Any:
    table = describe.table_at(Recipe, key[:-1])
    field = describe.fields_of(table).get(key[-1]) if table else None
    return field.default if field is not None and not field.is_required() else None


@cache
def _versions() -> dict[str, str]:
    """Installed versions, read from package metadata: nothing is imported."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load_run_spec(path: str | Path, *, own: bool = False) -> RunSpec:
    """Read a run.toml. Raises SpecError with every problem.

    Only the engine, in its own run directory, passes `own=True` and gets the limits as written. From any other file
    they are dropped: a file may neither allow remote code nor bring a command to run.
    """
    document = read_document(path)
    spec, problems = check_table(RunSpec, document.data)
    if problems or spec is None:
        raise SpecError(document.refuse(problems))
    return spec if own else spec.model_copy(update={"limits": Limits()})


def dump_run_spec(spec: RunSpec) -> str:
    """The text of run.toml: every value written out, None left out. `load_run_spec` gives an equal spec back."""
    data = spec.model_dump(by_alias=True, exclude_none=True)
    return tomlkit.dumps({key: value for key, value in data.items() if value != {}})
