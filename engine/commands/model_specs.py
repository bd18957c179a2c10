"""Run specs of models that are no runs, for `eval` and `chat`: on a recipe's data and with its settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.model.reference import base_of_adapter


def spec_for_model(
    model: str, recipe: str, profile: str, overrides: Sequence[str], *, trust_remote_code: bool
) -> RunSpec:
    """The run spec for scoring `model` (hub id, folder of a model or an adapter, builtin:NAME) on a recipe's data. The
    recipe's settings for its own model are reset (adapter and revision, and unless `model` is built-in, random weights
    and tokenizer); `overrides` come last."""
    chosen = str(Path(model).absolute()) if Path(model).is_dir() else model
    own = {"model.adapter": "", "model.revision": "", "model.id": chosen}
    if not model.startswith(BUILTIN_PREFIX):
        own |= {"model.init": "", "model.tokenizer": ""}
    if Path(chosen, ADAPTER_CONFIG).is_file():
        base, revision = base_of_adapter(Path(chosen))
        own |= {"model.id": base, "model.revision": revision or "", "model.adapter": chosen, "method.kind": "lora"}
        if _has_tokenizer(Path(chosen)):
            own["model.tokenizer"] = chosen
    sets = [f"{key}={json.dumps(value) if value else ''}" for key, value in own.items()]
    spec = resolve(profile, recipe, [*sets, *overrides]).spec
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"trust_remote_code": trust_remote_code})})


def spec_for_base(
    adapter: str, recipe: str, profile: str, overrides: Sequence[str], command: str, *, trust_remote_code: bool
) -> RunSpec:
    """`spec_for_model` of the model that `adapter` started from. Raises UsageError, which names `command`, if it is no
    folder of an adapter."""
    if not Path(adapter, ADAPTER_CONFIG).is_file():
        options = " -p PROFILE -r RECIPE" if command == "eval" else ""
        raise UsageError(
            f"--base: {adapter} is not an adapter, so its base is unknown",
            expected="a RUN, or the folder of an adapter",
            fix=f"give the base as a second model: tunedeck {command} MODEL BASE{options}",
        )
    base, revision = base_of_adapter(Path(adapter))
    more = [f"model.revision={revision}"] if revision else []
    if Path(base).is_dir() and not _has_tokenizer(Path(base)):  # a base that only the adapter's run has
        more.append(f"model.tokenizer={json.dumps(str(Path(adapter).absolute()))}")
    return spec_for_model(base, recipe, profile, [*more, *overrides], trust_remote_code=trust_remote_code)


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))
