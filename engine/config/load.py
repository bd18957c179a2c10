"""Resolves a profile, a recipe and overrides to one run spec; writes a run spec as `run.toml` and reads it back.

Precedence: defaults < recipe < stage < profile [overrides] < --set, and [parallel] of the profile < [parallel] of the
recipe < --set. Stages stay apart; `engine.config.stages` merges one over the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from engine.config.check.check import check_table
from engine.config.check.hardware_rules import merge_parallel, problems_of_parallel, problems_on_device
from engine.config.check.overrides import apply_overrides, leaf_items, leave_sweep, parse_overrides, set_value
from engine.config.files.document import Document, Problem, parse_document, read_document, value_at
from engine.config.files.find import SpecFile, SpecKind, find_spec_file, make_absolute
from engine.config.files.machine import installed, working_directory
from engine.config.files.text import quoted
from engine.config.files.trust import are_kept
from engine.config.schema import base
from engine.config.schema.base import NAME_PATTERN, Table
from engine.config.schema.finish import PUSH, WEBHOOK
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Limits, Profile, Provenance, RunSpec
from engine.config.stages import enabled_stages, stage_recipe
from engine.errors import SpecError

Result = TypeVar("Result")

SPEC_TABLES: dict[SpecKind, type[Profile] | type[Recipe]] = {"profile": Profile, "recipe": Recipe}

PACKAGES = ("tunedeck", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")
"""Their versions can change the numbers of a run."""

LEARNING_NEUTRAL_KEYS = (
    "train.micro_batch",
    "train.gradient_checkpointing",
    "train.mlp_tiles",
    "train.activation_offload",
    "train.optimizer_offload",
    "train.compile",
    "train.loss",
    "train.log_every_steps",
    "train.deterministic",
    "model.attention",
    "data.workers",
    "eval.every_steps",
    "eval.per_epoch",
    "eval.at_start",
    "eval.limit",
    "eval.samples",
    "eval.prompts",
    "checkpoint.every_steps",
    "checkpoint.per_epoch",
    "checkpoint.every_minutes",
    "checkpoint.keep",
    "evaluate",
    "generate",
    "trackers",
    "finish",
    "backoff.ladder",
    "backoff.grow",
)
"""Keys that a profile may override without a notice: they concern memory, speed and record keeping, not learning."""


@dataclass(frozen=True)
class Resolved:
    spec: RunSpec
    notices: list[str]


@dataclass(frozen=True)
class _Layers:
    profile: Document
    recipe: Document
    overrides: Sequence[str]
    folder: Path
    """The folder that relative paths in the recipe start from."""
    cwd: Path
    """The folder that relative paths in the overrides start from."""


def load_spec_file(kind: SpecKind, file: SpecFile) -> Table:
    """Check one profile or recipe by itself. Raises SpecError with every problem of the file."""
    document = read_document(file.path)
    name_problems = settle_name(document, file.path.stem)
    table, problems = check_table(SPEC_TABLES[kind], document.data)
    if problems or name_problems or table is None:
        raise SpecError(document.render_all([*name_problems, *problems]))
    return table


def load_recipe(file: SpecFile) -> Recipe:
    """Check a recipe and make its paths absolute, as a run would have it. Raises SpecError with every problem."""
    table = load_spec_file("recipe", file)
    document = Document(str(file.path), table.model_dump(by_alias=True, exclude_none=True))
    make_absolute(document, file.folder, working_directory().absolute())
    return Recipe.model_validate(document.data)


def name_note(file: SpecFile) -> str | None:
    """A note if the key `name` differs from the file's name, which is used instead; else None."""
    document = read_document(file.path)
    written, stem = document.data.get("name"), file.path.stem
    if not _is_name(written) or not _is_name(stem) or written == stem:
        return None
    return (
        f"{document.written_at(('name',))}: name: {quoted(written)} is not used; the name is that of the file: "
        f"{quoted(stem)}"
    )


def check_text(kind: SpecKind, text: str, stem: str, label: str) -> list[str]:
    """The problems of a text that is to become STEM.toml, each as `label:line: ...`."""
    try:
        document = parse_document(text, label)
    except SpecError as error:
        return error.problems
    name_problems = settle_name(document, stem)
    _, problems = check_table(SPEC_TABLES[kind], document.data)
    return document.render_all([*name_problems, *problems])


def settle_name(document: Document, stem: str) -> list[Problem]:
    """Set the document's `name` to `stem`, unless `stem` is no valid name; a problem if it then has none. An invalid
    name in the document is left for the check of the whole file to report."""
    written = document.data.get("name")
    if _is_name(stem) and (written is None or _is_name(written)):
        document.data["name"] = stem
    elif written is None:
        allowed = "lower-case letters, digits, '.', '_' and '-' are allowed: rename the file"
        return [Problem(("name",), f"missing, and the file name {quoted(stem)} is not a valid name", allowed)]
    return []


def _is_name(text: object) -> bool:
    return isinstance(text, str) and len(text) <= 80 and re.fullmatch(NAME_PATTERN, text) is not None


def resolve(
    profile: str,
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    cwd: Path | None = None,
) -> Resolved:
    """Resolve a profile and a recipe (names or paths) and overrides to a run spec. `name` is by default the recipe's;
    names are searched and relative paths start in `cwd`, by default the working directory.

    Raises one SpecError with the problems of all three.
    """
    cwd = (cwd or working_directory()).absolute()
    profile_file, recipe_file = _both(
        lambda: find_spec_file("profile", profile, cwd), lambda: find_spec_file("recipe", recipe, cwd)
    )
    profile_document, recipe_document = _both(
        lambda: read_document(profile_file.path), lambda: read_document(recipe_file.path)
    )
    name_problems = [
        line
        for document, file in ((profile_document, profile_file), (recipe_document, recipe_file))
        for line in document.render_all(settle_name(document, file.path.stem))
    ]
    provenance = Provenance.model_validate(
        {
            "profile_file": profile_file.label,
            "profile_sha256": profile_document.sha256,
            "recipe_file": recipe_file.label,
            "recipe_sha256": recipe_document.sha256,
            "set": list(overrides),
            "versions": dict(_versions()),
        }
    )
    layers = _Layers(profile_document, recipe_document, overrides, recipe_file.folder, cwd)
    return _assemble(layers, name, limits, provenance, name_problems)


def override(
    spec: RunSpec,
    overrides: Sequence[str],
    *,
    profile: str | None = None,
    name: str | None = None,
    limits: Limits | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Apply further overrides to a run spec and, where given, another profile (name or path), name or limits. Raises
    SpecError as `resolve` does.

    Without another profile, the profile's own [overrides] are not applied again: the recorded recipe contains them.
    """
    cwd = (cwd or working_directory()).absolute()
    written = spec.model_dump(by_alias=True, exclude_none=True)
    changed = {"set": [*spec.provenance.set_, *overrides], "versions": dict(_versions())}
    name_problems: list[str] = []
    if profile is not None:
        file = find_spec_file("profile", profile, cwd)
        profile_document = read_document(file.path)
        name_problems = profile_document.render_all(settle_name(profile_document, file.path.stem))
        changed |= {"profile_file": file.label, "profile_sha256": profile_document.sha256, "parallel": ""}
    else:
        profile_document = Document("run.toml", written["profile"])
        profile_document.data.pop("overrides", None)
    layers = _Layers(profile_document, Document("run.toml", written["recipe"]), overrides, cwd, cwd)
    provenance = Provenance.model_validate({**written["provenance"], **changed})
    resolved = _assemble(layers, name or spec.name, limits or spec.limits, provenance, name_problems)
    resolved = Resolved(resolved.spec.model_copy(update={"data_version": spec.data_version}), resolved.notices)
    if profile is not None:
        return resolved
    kept = resolved.spec.profile.model_copy(update={"overrides": spec.profile.overrides})
    return Resolved(resolved.spec.model_copy(update={"profile": kept}), resolved.notices)


def _both(first: Callable[[], Result], second: Callable[[], Result]) -> tuple[Result, Result]:
    """The results of both, or one SpecError with the problems of both."""
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
    layers: _Layers, name: str | None, limits: Limits, provenance: Provenance, problems: list[str]
) -> Resolved:
    """Merge the layers, check the whole, make its paths absolute. Raises one SpecError, `problems` included."""
    profile, recipe = layers.profile, layers.recipe
    overrides, override_problems = parse_overrides(layers.overrides)
    notices = _apply_profile_overrides(profile, recipe, {".".join(override.key) for override in overrides})
    problems = [*problems, *override_problems, *apply_overrides(profile, recipe, overrides)]
    notices += leave_sweep(recipe, overrides)
    checked_profile, profile_problems = check_table(Profile, profile.data)
    checked_recipe, recipe_problems = check_table(Recipe, recipe.data)
    if checked_profile is not None and checked_recipe is not None:
        recipe_problems += problems_of_parallel(checked_profile, checked_recipe)
        recipe_problems += _problems_on_device(checked_profile, checked_recipe)
    problems += profile.render_all(profile_problems) + recipe.render_all(recipe_problems) + _run_name_problems(name)
    if problems or checked_profile is None or checked_recipe is None:
        raise SpecError(list(dict.fromkeys(problems)))
    make_absolute(recipe, layers.folder, layers.cwd)
    # Titles and notes come from the checked recipe: there their unsafe characters have been made visible.
    texts = checked_recipe.model_dump(include={"title", "notes"})
    merged = merge_parallel(checked_profile, checked_recipe)
    notices += [merged.notice] if merged.notice else []
    replaced = {"parallel": merged.provenance or provenance.parallel}
    parts = {
        "name": name or checked_recipe.name,
        "profile": merged.profile,
        "recipe": Recipe.model_validate({**recipe.data, **texts}),
        "provenance": provenance.model_copy(update=replaced),
        "limits": limits,
    }
    return Resolved(RunSpec.model_validate(parts), notices)


def _problems_on_device(profile: Profile, recipe: Recipe) -> list[Problem]:
    """Those of each enabled stage, if the recipe has stages."""
    if not recipe.stages:
        return list(problems_on_device(profile, recipe))
    found = []
    for number, stage in enabled_stages(recipe):
        for problem in problems_on_device(profile, stage_recipe(recipe, stage)) if stage.kind == "train" else ():
            of_stage = problem.under(("stages", number - 1))
            written = value_at(stage.model_dump(by_alias=True), problem.place) is not None
            found.append(of_stage if written else problem)
    return list(dict.fromkeys(found))


def _run_name_problems(name: str | None) -> list[str]:
    if name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        return []
    if "=" in name and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,119}", name):  # of a sweep's point, which is resumed
        return []
    return [
        (
            f"--name {quoted(name)}: letters, digits, '.', '_' and '-' are allowed, starting with a letter or "
            "digit, at most 80"
        )
    ]


def _apply_profile_overrides(profile: Document, recipe: Document, on_command_line: set[str]) -> list[str]:
    """Write the profile's [overrides] into `recipe`; a sentence for each that changes the training result, unless
    `--set` changes it afterwards."""
    table = profile.data.get("overrides")
    notices = []
    for key, value in leaf_items(table) if isinstance(table, dict) else ():
        dotted = ".".join(key)
        before = value_at(recipe.data, key)
        before = _default(key) if before is None else before
        if base.type_at(Recipe, key) is None:
            continue  # unknown keys are reported later, at their line in the profile
        set_value(recipe, key, value, profile.written_at(("overrides", *key)))
        silent = dotted.startswith(LEARNING_NEUTRAL_KEYS) or dotted in on_command_line
        if value != before and not silent:
            was = "unset" if before is None else quoted(before)
            notices.append(f"the profile sets {dotted} = {quoted(value)} (was {was}): this changes the training result")
    return notices


def _default(key: tuple[str, ...]) -> Any:
    table = base.table_at(Recipe, key[:-1])
    field = base.fields_of(table).get(key[-1]) if table else None
    return field.default if field is not None and not field.is_required() else None


@cache
def _versions() -> dict[str, str]:
    return {package: version for package in PACKAGES if (version := installed(package))}


def load_run_spec(path: str | Path, *, own: bool = False) -> RunSpec:
    """Read a run.toml. Raises SpecError with every problem.

    `own=True`, for a run directory, keeps the limits that this user gave himself (`engine.config.files.trust`). All
    others are dropped: a file may neither allow remote code nor bring a shell command.
    """
    document = read_document(path)
    spec, problems = check_table(RunSpec, document.data)
    if problems or spec is None:
        raise SpecError(document.render_all(problems))
    if "data_version" not in document.data:
        spec = spec.model_copy(update={"data_version": 1})
    spec = _where_its_run_is(spec, Path(path).absolute())
    given = document.data.get("limits", {})
    if spec.limits == Limits() or (own and are_kept(Path(path), given)):
        return spec
    return spec.model_copy(update={"limits": Limits()})


STAGE_OF_RUN = re.compile(r"(run:)?(/.+)(/stages/[^/@]+)(/[^@]*|@[^/]*)?")


def _where_its_run_is(spec: RunSpec, path: Path) -> RunSpec:
    """A stage's run.toml names the stage that it starts from by the path of that time. If the run was moved, renamed or
    imported since, the path of the stage beside this one takes its place. The path of another run's stage stays: the
    run's own run.toml has it, too."""
    if path.parents[1].name != "stages" or not (whole := path.parents[2] / path.name).is_file():
        return spec
    changes = {}
    for key in ("id", "adapter"):
        named = STAGE_OF_RUN.fullmatch(getattr(spec.recipe.model, key) or "")
        if named is None or named[2] == str(path.parents[2]) or not Path(f"{path.parents[2]}{named[3]}").is_dir():
            continue
        if f"{named[2]}{named[3]}" not in whole.read_text("utf-8"):
            changes[key] = f"{named[1] or ''}{path.parents[2]}{named[3]}{named[4] or ''}"
    model = spec.recipe.model.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})}) if changes else spec


def brings_limits(path: Path) -> bool:
    """Whether a run.toml has limits that this user did not give."""
    given = read_document(path).data.get("limits", {})
    return isinstance(given, dict) and any(given.values()) and not are_kept(path, given)


def without_destinations(spec: RunSpec) -> RunSpec:
    """For others: a webhook's URL is a secret, and repositories are their owner's."""
    finish = spec.recipe.finish
    if not finish.destinations():
        return spec
    typed = [text for text in spec.provenance.set_ if not text.strip().startswith((WEBHOOK, PUSH))]
    kept = finish.model_copy(update={"webhook": None, "push": None, "push_public": False})
    return spec.model_copy(
        update={
            "recipe": spec.recipe.model_copy(update={"finish": kept}),
            "provenance": spec.provenance.model_copy(update={"set_": typed}),
        }
    )


def dump_run_spec(spec: RunSpec) -> str:
    """A run spec as the text of run.toml, with defaults and without None; `load_run_spec` reads an equal spec back."""
    import tomlkit  # reading needs only tomli, and the console reads before its first screen

    data = spec.model_dump(by_alias=True, exclude_none=True)
    return tomlkit.dumps({key: value for key, value in data.items() if value != {}})
