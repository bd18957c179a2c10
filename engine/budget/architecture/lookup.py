"""Where the config of a model is found: built in, a local folder, this machine's hub cache, or shipped with Tunedeck.

Nothing is downloaded here (`engine.budget.architecture.hub` does that) and no weights are read. The facts in a config
are read in `engine.budget.architecture.facts`.

Try: `python -c "from engine.budget.architecture.lookup import find_config; print(find_config('builtin:tiny'))"`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomli

from engine.budget.architecture.assembled import (
    ASSEMBLED_PREFIX,
    assembled_config,
    parse_assembled,
    problems_of_experts,
)
from engine.budget.architecture.facts import Architecture, from_config
from engine.errors import ConfigNotHereError, UsageError
from engine.journal.index import resolve_run
from engine.journal.stages import result_run
from engine.spec.files.hub_cache import find_snapshot
from engine.spec.load import load_run_spec
from engine.spec.schema.recipe import Model, RopeScaling
from engine.spec.schema.run import RunSpec

BUILTIN_PREFIX = "builtin:"
RUN_PREFIX = "run:"


def find_architecture(spec: RunSpec) -> Architecture:
    """The facts of the model a run starts from.

    Raises ConfigNotHereError when no config can be found on this machine, UsageError for an unknown family or a folder
    that does not exist.
    """
    model, revision = start_of(spec.recipe.model.id, spec.recipe.model.revision)
    if model.startswith(ASSEMBLED_PREFIX):
        return from_config(find_config(model, revision))
    file = _config_file(model, revision)
    return _shipped_architecture(model) if file is None else from_config(_read_json(file))


def find_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The config of a built-in model, local folder, cached hub model or shipped entry, as the parsed JSON of its
    config.json.

    Raises ConfigNotHereError when no config can be found on this machine, UsageError for a folder that does not exist.
    """
    model, revision = start_of(model, revision)
    if model.startswith(ASSEMBLED_PREFIX):
        experts, per_token, dense = parse_assembled(model)
        return _assembled(find_config(dense, revision), experts, per_token)
    file = _config_file(model, revision)
    return _shipped_config(model) if file is None else _read_json(file)


def _assembled(dense: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """The config of the mixture of `experts` models with the config `dense`, with `per_token` experts for each token,
    before it is assembled. Raises UsageError if it cannot be assembled."""
    problems = problems_of_experts(["the recipe's model"], [dense])
    if problems:
        raise UsageError("no mixture can be assembled: " + "; ".join(problems), fix="choose another model.id")
    return assembled_config(dense, experts, per_token)


def _config_file(model: str, revision: str | None) -> Path | None:
    """The path of a model's config.json: in the model's folder, where it may be missing, or in the hub cache. None for
    a built-in model, and for a hub model that is not cached. Raises UsageError if a model folder does not exist."""
    if model.startswith(BUILTIN_PREFIX):
        return None
    local = os.path.expanduser(model) if model.startswith("~") else model
    if os.path.isdir(local):
        return Path(local, "config.json")
    if os.path.isabs(local) or model.startswith("."):
        raise UsageError(f"the model folder {model} does not exist", fix="check model.id")
    return _cached_config(model, revision)


def _shipped_config(model: str) -> dict[str, Any]:
    if model.startswith(BUILTIN_PREFIX):
        return builtin_config(model)
    shipped = _shipped_entry(model.lower())
    if shipped is not None:
        return dict(shipped["config"])
    raise ConfigNotHereError(
        f"no config.json of {model!r} on this machine",
        expected="a folder with a config.json, a model in the hub cache, or one of the shipped profiles/models",
        fix=f"download it once with: hf download {model} config.json",
    )


@lru_cache(maxsize=64)
def _shipped_architecture(model: str) -> Architecture:
    """The facts of a shipped model; cached, because shipped entries do not change while a process runs."""
    return from_config(_shipped_config(model))


def start_of(model: str, revision: str | None) -> tuple[str, str | None]:
    """Resolve "run:RUN" to the (model, revision) at the start of its chain of runs: RUN, the run that RUN started from,
    and so on. That model has the same shapes. If a run of the chain assembled a mixture, the mixture is returned. Other
    names are returned unchanged."""
    for start in _starts(model):
        model, revision = start.id, start.revision
    return model, revision


def scaling_of(model: str) -> RopeScaling | None:
    """The rotary scaling that "run:RUN" was trained with: its own, or that of the run it started from. None if there is
    none, and for models that are not "run:RUN". Raises UsageError if there is no such run."""
    return next((start.rope_scaling for start in _starts(model) if start.rope_scaling is not None), None)


def _starts(model: str) -> Iterator[Model]:
    """Yield the table [model] of the run that `model` ("run:RUN") names, then that of the run which this run started
    from, and so on. For a stage that assembled a mixture, yield a [model] whose id is the mixture's folder, and stop.
    Yields nothing for other names. Raises UsageError if there is no such run."""
    while model.startswith(RUN_PREFIX):
        text = model.removeprefix(RUN_PREFIX).partition("@")[0]
        run = result_run(resolve_run(text, None))
        assembled = run.assembly.is_file()
        start = Model(id=str(run.model)) if assembled else load_run_spec(run.run_toml).recipe.model
        yield start
        model = start.id


def builtin_config(name: str) -> dict[str, Any]:
    """The config of "builtin:NAME", read from profiles/models/builtin-NAME.toml. Raises UsageError if there is no such
    model."""
    entry = _shipped_entry(name) if name.startswith(BUILTIN_PREFIX) else None
    if entry is None:
        ids = sorted(str(model) for entry in shipped_entries() for model in entry["ids"])
        known = ", ".join(model for model in ids if model.startswith(BUILTIN_PREFIX))
        raise UsageError(f"no built-in model {name!r}", expected=known, fix="set model.id to one of them")
    return dict(entry["config"])


@lru_cache(maxsize=64)
def _shipped_entry(model: str) -> dict[str, Any] | None:
    """The content of the file in profiles/models that describes a model, by its lower-case id; None if there is none.
    Only files in which the id occurs are parsed: parsing all of them took as long as a plan."""
    for text in _shipped_texts():
        if model in text.lower():
            entry = tomli.loads(text)
            if model in [str(name).lower() for name in entry["ids"]]:
                return entry
    return None


def shipped_entries() -> Iterator[dict[str, Any]]:
    """Yield the content of each file in profiles/models: `ids`, `source`, `parameters`, and the table `config`."""
    yield from map(tomli.loads, _shipped_texts())


def _shipped_texts() -> Iterator[str]:
    """Yield the text of each file in profiles/models, in the order of their names; built-in models come first."""
    yield from map(_text_of, _shipped_files())


@cache
def _shipped_files() -> list[Path]:
    return sorted(Path(str(resources.files("profiles"))).glob("models/*.toml"))


@cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _cached_config(model: str, revision: str | None) -> Path | None:
    """Path of a model's config.json in the hub cache, None if absent there."""
    snapshot = find_snapshot(model, revision)
    config = snapshot / "config.json" if snapshot is not None else None
    return config if config is not None and config.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    """A config file as a dict; raises UsageError when it is absent or not JSON."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            expected="the model's config.json",
            fix="check the folder named by model.id",
        ) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} does not hold a JSON object", fix="check the folder named by model.id")
    return loaded
