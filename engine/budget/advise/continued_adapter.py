"""Compares a recipe with the adapter that its run continues: what the adapter determines is taken from it, a key of
[method] that says otherwise is an error, and so is another base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.architecture.continued import KEYS, SavedAdapter, find_adapter, method_of, values_of
from engine.architecture.facts import Architecture
from engine.architecture.lookup import start_of
from engine.budget.advise.staged_plan import RunFacts, planning_spec
from engine.budget.trace.memory_config import patterns_of
from engine.budget.trace.trainable import adapted_modules
from engine.config.load import load_run_spec
from engine.config.schema.recipe import Method, Recipe
from engine.config.schema.run import RunSpec
from engine.config.stages import enabled_stages, stage_recipe, weights_chain
from engine.errors import TunedeckError, UsageError
from engine.journal.directory import RUN_TOML

SAMPLE_BYTES = 2**20
"""Bytes at the end of a weight file that are compared."""


class _Continued(NamedTuple):
    """A run, or a stage, that continues an adapter."""

    recipe: Recipe
    adapter: SavedAdapter
    arch: Architecture | None
    written: frozenset[str]
    """Keys of [method] that the user wrote."""


def settle_continued(spec: RunSpec, facts: RunFacts) -> tuple[RunSpec, list[str]]:
    """The run spec with what the adapter that it continues determines, and a sentence that shows it; the stages of a
    staged run are settled when they begin."""
    found = None if spec.recipe.stages else _continued(spec, facts)
    if found is None:
        return spec, []
    if not found.adapter.is_lora:
        return spec, [f"the adapter {found.adapter.folder} of type {found.adapter.kind} is continued unchanged"]
    method = spec.recipe.method.model_copy(update=values_of(found.adapter))
    if found.arch is not None:
        method = method_of(method, found.adapter, found.arch)
    named = {"targets": found.adapter.config.get("target_modules")} if found.arch is None else {}
    values = {**{key: getattr(method, key) for key in KEYS if key not in ("exclude", "layers")}, **named}
    shown = ", ".join(f"{key} = {_text(value)}" for key, value in values.items())
    unused = _differing(found, _in_file(spec.recipe.method))
    notices = [f"the adapter {found.adapter.folder} is continued: {shown}", *_notes_on_base(spec.recipe, found.adapter)]
    if unused:
        theirs = ", ".join(f"method.{key} = {_text(getattr(spec.recipe.method, key))}" for key in unused)
        notices.append(f"{theirs} of the recipe: not used; the adapter's values are used instead")
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"method": method})}), notices


def refuse_continued(spec: RunSpec, facts: RunFacts) -> None:
    """Raise UsageError if a key of [method] differs from the adapter that the run, or one of its stages, continues, or
    if the adapter is of a run that started from another base."""
    if not spec.recipe.stages:
        found = _continued(spec, facts)
        if found is not None:
            _refuse_other_base(found.recipe, found.adapter)
            _refuse_differences(found)
        return
    for _, stage in enabled_stages(spec.recipe):
        recipe = stage_recipe(spec.recipe, stage)
        chain = list(weights_chain(spec.recipe, stage))
        if stage.kind != "train" or recipe.method.kind != "lora" or (len(chain) > 1 and chain[1].kind != "train"):
            continue
        if len(chain) == 1:
            adapter = find_adapter(recipe.model)
            if adapter is not None:
                arch = facts.of(planning_spec(spec, stage).recipe.model).architecture
                found = _Continued(recipe, adapter, arch, frozenset(stage.method) | _written(spec))
                _refuse_other_base(recipe, adapter)
                _refuse_differences(found, stage.name)
            continue
        before = stage_recipe(spec.recipe, chain[1]).method
        if before.kind == "lora":
            _refuse_stage(recipe.method, before, stage.name, chain[1].name)


def _continued(spec: RunSpec, facts: RunFacts) -> _Continued | None:
    adapter = find_adapter(spec.recipe.model) if spec.recipe.method.kind == "lora" else None
    if adapter is None:
        return None
    return _Continued(spec.recipe, adapter, facts.of(spec.recipe.model).architecture, _written(spec))


def _written(spec: RunSpec) -> frozenset[str]:
    """The keys of [method] that were written where the adapter is named: after --set, or also in the recipe. A run's
    own file has every key: there, those that differ from the default count."""
    typed = [text.partition("=")[0].strip() for text in spec.provenance.set_]
    on_command_line = frozenset(key.removeprefix("method.") for key in typed if key.startswith("method."))
    if ("model.adapter" if spec.recipe.model.adapter is not None else "model.id") in typed:
        return on_command_line
    return on_command_line | _in_file(spec.recipe.method)


def _in_file(method: Method) -> frozenset[str]:
    written = method.model_fields_set
    if len(written) >= len(Method.model_fields) - 1:  # a run.toml, which leaves only None out
        defaults = Method()
        written = {key for key in written if getattr(method, key) != getattr(defaults, key)}
    return frozenset(written)


def _values(found: _Continued) -> dict[str, Any]:
    """The adapter's values, by key of [method]; names of modules only where the model's are known."""
    if not found.adapter.is_lora:
        return dict.fromkeys(KEYS)
    return values_of(found.adapter) | _module_values(found)


def _module_values(found: _Continued) -> dict[str, Any]:
    """The adapter's targets, by the key that selects others: {} if the recipe selects the modules that it is on."""
    if found.arch is None or not found.adapter.shapes:
        return {}
    selected = patterns_of(found.arch, found.recipe)._replace(freeze=())  # frozen matrices are still there
    if adapted_modules(found.arch, selected) == set(found.adapter.adapted):
        return {}
    method = found.recipe.method
    own = method_of(method, found.adapter, found.arch)
    by_targets = "targets" in found.written and method.targets != own.targets
    if by_targets:
        return {"targets": own.targets}
    return {"layers": own.layers} if method.layers else {"exclude": own.exclude}


def _differing(found: _Continued, keys: frozenset[str]) -> list[str]:
    """Return those of `keys` whose values are not the adapter's."""
    method, values = found.recipe.method, _values(found)
    return [key for key in KEYS if key in keys & values.keys() and getattr(method, key) != values[key]]


def _refuse_differences(found: _Continued, stage: str = "") -> None:
    differing = _differing(found, found.written)
    if not differing:
        return
    prefix, values = f"stages.{stage}.method" if stage else "method", _values(found)
    mine = ", ".join(f"{prefix}.{key} = {_text(getattr(found.recipe.method, key))}" for key in differing)
    theirs = ", ".join(f"{key} = {_text(values[key])}" for key in differing)
    raise UsageError(
        f"{mine}: the adapter {found.adapter.folder} that is continued has {theirs}",
        expected="the adapter's values, which are read from it",
        fix=f"leave {', '.join(f'{prefix}.{key}' for key in differing)} out, or leave out model.adapter to start "
        "a new adapter",
    )


def _refuse_stage(method: Method, before: Method, stage: str, earlier: str) -> None:
    differing = [key for key in KEYS if _effective(method, key) != _effective(before, key)]
    if differing:
        mine = ", ".join(f"{key} = {_text(_effective(method, key))}" for key in differing)
        theirs = ", ".join(f"{key} = {_text(_effective(before, key))}" for key in differing)
        raise UsageError(
            f"method of stage {stage}: {mine}, but it continues the adapter of stage {earlier}, which has {theirs}",
            expected="the same values in both stages, except that also_train may add modules",
            fix=f"leave {', '.join(differing)} out of stage {stage}, or set them in [method] for all stages",
        )


def _effective(method: Method, key: str) -> Any:
    return method.effective_alpha if key == "alpha" else getattr(method, key)


def _text(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(f'"{each}"' for each in value[:6]) + (f" and {len(value) - 6} more" if len(value) > 6 else "")
        return f"[{shown}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_other_base(recipe: Recipe, adapter: SavedAdapter) -> None:
    """Raise UsageError if the run that made the adapter started from another model."""
    theirs, mine = _base_of_run(adapter.folder), start_of(recipe.model.id, recipe.model.revision)[0]
    if theirs is not None and recipe.model.adapter is not None and not _same_model(theirs, mine):
        raise UsageError(
            f"model.id = {recipe.model.id}, but the adapter {adapter.folder} was trained on {theirs}",
            expected="the base that the adapter was trained on",
            fix=f"set model.id to {theirs}",
        )


def _notes_on_base(recipe: Recipe, adapter: SavedAdapter) -> Iterator[str]:
    named, mine = adapter.config.get("base_model_name_or_path"), start_of(recipe.model.id, recipe.model.revision)[0]
    if recipe.model.adapter is None or not named or _base_of_run(adapter.folder) is not None:
        return
    if not _same_model(str(named), mine):
        yield (
            f"the adapter {adapter.folder} was trained on {named}, but model.id is {recipe.model.id}: on "
            "another base its results are wrong"
        )


def _base_of_run(folder: Path) -> str | None:
    """The model that the run of an adapter started from; None if the adapter is in no run."""
    run = next((place for place in folder.resolve().parents[:3] if (place / RUN_TOML).is_file()), None)
    if run is None:
        return None
    try:
        model = load_run_spec(run / RUN_TOML).recipe.model
        return start_of(model.id, model.revision)[0]
    except TunedeckError:  # a record of another version, or of a run that is gone
        return None


def _same_model(one: str, other: str) -> bool:
    """Whether two names mean one model, as far as the files here show: the same name, the last part of a hub id for a
    folder, or folders with the same files."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    if first.is_dir() and second.is_dir():
        return first.resolve() == second.resolve() or _digest(first) == _digest(second)
    return one.lower() == other.lower() or first.name.lower() == second.name.lower()


def _digest(folder: Path) -> list[tuple[str, int, bytes]]:
    """Name, size and last bytes of each weight file."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - SAMPLE_BYTES))
            found.append((path.name, size, file.read()))
    return found
