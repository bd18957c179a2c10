"""What a run needs of this machine, checked before its directory is created: Python packages, GPUs, and what comes from
the hub."""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from engine.config.files.caches import (
    find_snapshot,
    has_adapter,
    has_data_set,
    has_tokenizer,
    has_weights,
    offline_variable,
)
from engine.config.files.document import read_document
from engine.config.files.find import BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX, list_spec_files, split_run_reference
from engine.config.files.machine import install_command, install_packages, working_directory
from engine.config.load import load_run_spec, load_spec_file
from engine.config.schema.data import Source
from engine.config.schema.recipe import Model, Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.config.stages import BASE, enabled_stages, origins, stage_specs
from engine.errors import EnvironmentProblem, SpecError
from engine.journal.index import resolve_run
from engine.journal.stages import result_run

TRAINING_PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "rensa")


def missing_packages() -> list[str]:
    return [name for name in TRAINING_PACKAGES if find_spec(name) is None]


def require_training_packages() -> None:
    missing = missing_packages()
    if missing:
        raise EnvironmentProblem(
            f"this needs {', '.join(missing)}, which is not part of a light installation of Tunedeck",
            fix=install_command("train", missing),
        )


DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""Drivers that torch can use although NVML does not list their GPUs: Jetson, WSL, ROCm."""


def require_device(spec: RunSpec) -> None:
    """Raise EnvironmentProblem if the profile asks for GPUs, and this machine has too few, or torch cannot use any."""
    wanted, name = spec.profile.device.count, spec.profile.name
    if spec.profile.device.kind != "cuda":
        return
    found = count_gpus()
    if found is not None and found < wanted:
        needs = "a GPU" if wanted == 1 else f"{wanted} GPUs"
        here = "has none" if not found else f"has {found}"
        raise EnvironmentProblem(f"profile {name!r} needs {needs}, but this machine {here}", fix=_profile_for_here())
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu"):
        raise EnvironmentProblem(
            f"profile {name!r} needs a GPU, but the installed torch {torch} was built without CUDA",
            fix="install torch with CUDA: https://pytorch.org/get-started",
        )


def own_profile() -> str | None:
    """The first of the user's own profiles whose device this machine has."""
    for file in list_spec_files("profile"):
        try:
            profile = load_spec_file("profile", file) if file.origin != "shipped" else None
        except SpecError:
            continue
        if isinstance(profile, Profile):
            gpus = count_gpus() if profile.device.kind == "cuda" else None
            if gpus is None or gpus >= profile.device.count:
                return file.name
    return None


def own_recipe() -> str | None:
    """The first of the user's own recipes by name, else the only recipe file of the working directory."""
    named = [file.name for file in list_spec_files("recipe") if file.origin != "shipped"]
    if named:
        return named[0]
    here = []
    for path in sorted(working_directory().glob("*.toml")):
        try:
            here += [path.name] if read_document(path).data.get("kind") == "recipe" else []
        except SpecError:
            continue
    return here[0] if len(here) == 1 else None


def missing_trackers(recipe: Recipe) -> list[str]:
    """Return the trackers of `trackers.use` whose packages are not installed."""
    return [name for name in recipe.trackers.use if find_spec(name) is None]


def require_trackers(recipe: Recipe) -> None:
    if missing := missing_trackers(recipe):
        raise EnvironmentProblem(
            f"trackers.use: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            fix=f"{install_packages(*missing)}; or train without trackers: --set trackers.use=[]",
        )


def count_gpus() -> int | None:
    """None if only torch can tell, because CUDA_VISIBLE_DEVICES or a driver other than NVIDIA's usual one decides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible.strip() in ("", "-1") else None
    count = _nvml_count()
    return count if count or not any(glob.glob(pattern) for pattern in DEVICE_FILES) else None


def _nvml_count() -> int:
    try:
        # Tried before pynvml is imported, which takes as long as everything else here.
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _profile_for_here() -> str:
    """The fix: the name of one of the user's own profiles for the CPU, else the command that writes one."""
    names = [file.name for file in list_spec_files("profile")]
    for file in list_spec_files("profile"):
        try:
            profile = load_spec_file("profile", file) if file.origin != "shipped" else None
        except SpecError:
            continue
        if isinstance(profile, Profile) and profile.device.kind == "cpu":
            return f"use -p {file.name}, a CPU profile"
    name = next(name for name in ("here", *(f"here-{number}" for number in range(2, 99))) if name not in names)
    return f"tunedeck profiles new {name} --detect creates a profile of this machine; then use -p {name}"


ANSWER_SECONDS = 5.0


class Missing(NamedTuple):
    what: str
    """Such as "model owner/name"."""
    fix: str
    """The command or option with which a run finds it."""


def require_hub(specs: Iterable[RunSpec], *, answers: Callable[[], bool] | None = None) -> None:
    """Raise EnvironmentProblem if the runs need something that is not here, and the hub may not be asked (offline mode)
    or does not answer. `answers` asks it."""
    missing = list(dict.fromkeys(found for spec in specs for found in missing_from_cache(spec)))
    if not missing:
        return
    variable = offline_variable()
    if variable is None and (answers or hub_answers)():
        return
    names = " and ".join(each.what for each in missing)
    why = f"{variable} is set" if variable else "the hub is not reachable"
    retry = f"unset {variable}" if variable else "connect to the network and try again"
    raise EnvironmentProblem(
        f"{names} {'are' if len(missing) > 1 else 'is'} not in this machine's hub cache, and {why}",
        expected="a connection to the hub, cached files, or an existing folder",
        fix="; or ".join([retry, *(each.fix for each in missing)]),
    )


def hub_answers() -> bool:
    """Sends one small request and waits ANSWER_SECONDS at most."""
    # Imported here because it takes a tenth of a second. HTTPError is the base error of the hub's HTTP client.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # re-exported lazily

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except HTTPError:
        return False
    return True


def missing_from_cache(spec: RunSpec) -> list[Missing]:
    """What a run, or any enabled stage, needs from the hub and the cache lacks. Sends no request."""
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
    """Random weights need only the model's config."""
    start = _first_model(model)
    if start is None or not _is_on_hub(start.id):
        return
    needed = [_has_config if start.init == "random" else has_weights]
    if start is model and model.tokenizer in (None, model.id):
        needed.append(has_tokenizer)  # an adapter's own is saved beside it
    yield from _missing_files("model", start.id, start.revision, needed)


def _first_model(model: Model) -> Model | None:
    """The [model] of the base to load: for "run:RUN" with an adapter as result that of RUN, followed back as far as
    necessary; None if that run's result contains all weights."""
    while model.id.startswith(RUN_PREFIX):
        run = result_run(resolve_run(split_run_reference(model.id)[0], None))
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
    """A `Missing` for the hub id `name`, unless a cached snapshot of `revision` passes all tests in `needed`. `what` is
    model, adapter or tokenizer."""
    snapshot = find_snapshot(name, revision)
    if snapshot is not None and all(test(snapshot) for test in needed):
        return
    version = f" --revision {revision}" if revision else ""
    key = "model.id" if what == "model" else f"model.{what}"
    yield Missing(f"{what} {name}", f"hf download {name}{version} (needs network access), or add --set {key}=FOLDER")


def _missing_data(key: str, sources: list[Source]) -> Iterator[Missing]:
    for source in sources:
        if source.enabled and source.hub is not None and not has_data_set(source.hub, source.config):
            yield Missing(
                f"data set {source.hub}",
                f"hf download --repo-type dataset {source.hub} --local-dir data (needs network access), then "
                f"start with --set {key}.{source.name}.path=data",
            )


def _is_on_hub(text: str) -> bool:
    """Not "builtin:", "run:" or "stage:", and not the path of a folder."""
    if text.startswith((BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX, "/", ".", "~")):
        return False
    return not os.path.isdir(text)
