"""Checks, before a run directory is created, that what a run takes from the hub is on this machine or can be fetched.

Reads the hub cache of this machine; only if something is missing there, sends one request to the hub. Files are not
fetched here: the engine does that when the run has started.

Try: `HF_HUB_OFFLINE=1 tunedeck train -p demo -r demo --set model.id=no/such-model`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.budget.architecture.lookup import BUILTIN_PREFIX, RUN_PREFIX
from engine.errors import EnvironmentProblem
from engine.journal.index import resolve_run
from engine.journal.stages import result_run
from engine.spec.files.hub_cache import (
    find_snapshot,
    has_adapter,
    has_data_set,
    has_tokenizer,
    has_weights,
    offline_variable,
)
from engine.spec.load import load_run_spec
from engine.spec.schema.data import Source
from engine.spec.schema.recipe import Model, Recipe
from engine.spec.schema.run import RunSpec
from engine.spec.stages import BASE, STAGE_PREFIX, enabled_stages, origins, stage_specs

ANSWER_SECONDS = 5.0
"""How long the hub may take for its answer."""


class Missing(NamedTuple):
    """Something of the hub that a run needs and that is not in the cache of this machine."""

    what: str
    """Description of what is missing, such as "model owner/name"."""
    fix: str
    """The command or option with which a run finds what is missing."""


def require_hub(specs: Iterable[RunSpec], *, unreachable: bool = False) -> None:
    """Raise EnvironmentProblem if the runs need something of the hub that is not on this machine, and the hub may not
    be asked (offline mode) or does not answer. `unreachable`: the hub was asked just now and did not answer."""
    missing = list(dict.fromkeys(found for spec in specs for found in missing_from_cache(spec)))
    if not missing:
        return
    variable = offline_variable()
    if variable is None and not unreachable and hub_answers():
        return
    names = " and ".join(each.what for each in missing)
    why = f"{variable} is set" if variable else "the hub does not answer"
    retry = f"unset {variable}" if variable else "connect, and try again"
    raise EnvironmentProblem(
        f"{names} {'are' if len(missing) > 1 else 'is'} not in the hub cache of this machine, and {why}",
        expected="a connection to the hub, files in its cache, or an existing folder",
        fix="; or ".join([retry, *(each.fix for each in missing)]),
    )


def hub_answers() -> bool:
    """Whether the hub answers one small request within ANSWER_SECONDS."""
    # Imported here because it takes a tenth of a second. HTTPError is the base error of the hub's HTTP client.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # re-exported lazily

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except HTTPError:
        return False
    return True


def missing_from_cache(spec: RunSpec) -> list[Missing]:
    """Return what a run, or any enabled stage of a staged run, needs from the hub that is not in the cache of this
    machine. Sends no request."""
    if not spec.recipe.stages:
        return list(_missing_of(spec.recipe))
    found = [missing for stage in stage_specs(spec) for missing in _missing_of(stage.recipe)]
    if any(BASE in origins(stage) for _, stage in enabled_stages(spec.recipe)):
        found += _missing_model(spec.recipe.model)
    return list(dict.fromkeys(found))


def _missing_of(recipe: Recipe) -> Iterator[Missing]:
    model, data = recipe.model, recipe.data
    yield from _missing_model(model)
    if model.adapter is not None and _is_on_hub(model.adapter):
        yield from _missing_files("adapter", model.adapter, None, [has_adapter])
    if model.tokenizer is not None and model.tokenizer != model.id and _is_on_hub(model.tokenizer):
        yield from _missing_files("tokenizer", model.tokenizer, None, [has_tokenizer])
    yield from _missing_data("data.sources", data.sources)
    yield from _missing_data("data.validation", data.validation)
    yield from _missing_data("evaluate.sources", recipe.evaluate.sources)


def _missing_model(model: Model) -> Iterator[Missing]:
    """Yield what is missing of the model that a [model] starts from, and of its tokenizer if that is used. Random
    weights need only the model's config."""
    start = _first_model(model)
    if start is None or not _is_on_hub(start.id):
        return
    needed = [_has_config if start.init == "random" else has_weights]
    if start is model and model.tokenizer in (None, model.id):
        needed.append(has_tokenizer)  # an adapter's own is saved beside it
    yield from _missing_files("model", start.id, start.revision, needed)


def _first_model(model: Model) -> Model | None:
    """Return the [model] that names the base to load. For "run:RUN" with an adapter as result this is the [model] of
    RUN, followed back as far as necessary. None if that run's result contains all weights, so that no base is loaded.
    """
    while model.id.startswith(RUN_PREFIX):
        run = result_run(resolve_run(model.id.removeprefix(RUN_PREFIX).partition("@")[0], None))
        if not run.run_toml.is_file() or run.assembly.is_file():
            return None
        recipe = load_run_spec(run.run_toml).recipe
        if recipe.method.kind == "full" or recipe.model.init == "random":
            return None  # both are saved with their base
        model = recipe.model
    return model


def _has_config(snapshot: Path) -> bool:
    return (snapshot / "config.json").is_file()


def _missing_files(
    what: str, name: str, revision: str | None, needed: Sequence[Callable[[Path], bool]]
) -> Iterator[Missing]:
    """Yield a `Missing` for the hub id `name`, unless a cached snapshot of `revision` passes all tests in `needed`;
    each test gets the snapshot's folder. `what` is model, adapter or tokenizer."""
    snapshot = find_snapshot(name, revision)
    if snapshot is not None and all(test(snapshot) for test in needed):
        return
    version = f" --revision {revision}" if revision else ""
    key = "model.id" if what == "model" else f"model.{what}"
    yield Missing(
        f"{what} {name}", f"hf download {name}{version}, where there is a network, or add --set {key}=FOLDER"
    )


def _missing_data(key: str, sources: list[Source]) -> Iterator[Missing]:
    for source in sources:
        if source.enabled and source.hub is not None and not has_data_set(source.hub, source.config):
            yield Missing(
                f"data set {source.hub}",
                f"hf download --repo-type dataset {source.hub} --local-dir data, where there is a network, "
                f"and start with --set {key}.{source.name}.path=data",
            )


def _is_on_hub(text: str) -> bool:
    """Whether `text`, which names a model, tokenizer or adapter, is a hub id: not "builtin:", "run:" or "stage:", and
    not the path of a folder."""
    if text.startswith((BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX, "/", ".", "~")):
        return False
    return not os.path.isdir(text)
