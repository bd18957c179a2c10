"""What a run takes from the adapter that it continues: rank, scaling, targets, dropout, and modules that are trained in
full, as adapter_config.json and the header of its weights have them. Tensors are not read here: see
`engine.model.saved_adapter`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.model_folder import ADAPTER_CONFIG, HEADER_BYTES
from engine.architecture.parameters import adaptable_names, parameter_names, parameters_by_name
from engine.config.files.caches import find_snapshot
from engine.config.files.find import BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX, split_run_reference
from engine.config.files.machine import path_of
from engine.config.schema.recipe import Method, Model, Recipe
from engine.errors import UnknownArchitectureError, UsageError
from engine.journal.files import read_table
from engine.journal.index import resolve_run
from engine.journal.stages import result_run

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before a module's name in an adapter file."""

KEYS = ("rank", "alpha", "dropout", "dora", "rslora", "targets", "exclude", "layers")
"""The keys of [method] that an adapter determines."""


class SavedAdapter(NamedTuple):
    """An adapter on this machine."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor, by its name in the file."""

    @property
    def kind(self) -> str:
        """Its type, as peft spells it."""
        return str(self.config.get("peft_type"))

    @property
    def is_lora(self) -> bool:
        return self.kind == "LORA"

    @property
    def rank(self) -> int:
        return int(self.config.get("r") or 0)

    @property
    def whole_modules(self) -> list[str]:
        """Names, or their ends, of the modules that are trained in full."""
        return list(self.config.get("modules_to_save") or [])

    @property
    def adapted(self) -> list[str]:
        """Dotted names of the modules, and of the fused weights of experts, that have matrices."""
        fused = tuple(str(name) for name in self.config.get("target_parameters") or ())
        found = dict.fromkeys(
            name.removeprefix(PREFIX).partition(".lora_")[0] for name in self.shapes if ".lora_" in name
        )
        modules = [name for name in found if not _holds_experts(name, fused)]
        blocks = dict.fromkeys(name.replace(".base_layer", "") for name in found if _holds_experts(name, fused))
        return [
            *modules,
            *(f"{block}.{name.rpartition('.')[2]}" for block in blocks for name in fused if _is_in(block, name)),
        ]


def _holds_experts(module: str, fused: Iterable[str]) -> bool:
    """Whether a name in the file stands for fused weights, which peft nests in wrappers of their module."""
    return any(_is_in(module.replace(".base_layer", ""), name) for name in fused)


def _is_in(block: str, parameter: str) -> bool:
    owner = parameter.rpartition(".")[0]
    return block == owner or block.endswith(f".{owner}") or owner.endswith(f".{block}")


def find_adapter(model: Model) -> SavedAdapter | None:
    """The adapter that a run without stages continues. None if it starts a new one, or the adapter is not on this
    machine."""
    folder = _folder_of(model.id if model.adapter is None else model.adapter)
    if folder is None and model.adapter is not None and not model.adapter.startswith(RUN_PREFIX):
        folder = find_snapshot(model.adapter, None)
    return _read(folder) if folder is not None and (folder / ADAPTER_CONFIG).is_file() else None


def _folder_of(text: str) -> Path | None:
    if text.startswith((BUILTIN_PREFIX, STAGE_PREFIX)):
        return None
    if not text.startswith(RUN_PREFIX):
        folder = path_of(text)
        return folder if folder.is_dir() else None
    name, which = split_run_reference(text)
    run = result_run(resolve_run(name, None))
    steps = [run.checkpoint(int(which)) / "weights"] if which and which.isdecimal() else []
    saved = sorted(run.checkpoints.glob("step-*/weights"), reverse=True)
    return next((folder for folder in (*steps, run.adapter, *saved) if (folder / ADAPTER_CONFIG).is_file()), None)


def _read(folder: Path) -> SavedAdapter:
    file, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    changed = weights.stat().st_mtime_ns if weights.is_file() else 0
    return _read_once(folder, file.stat().st_mtime_ns, changed)


@lru_cache(maxsize=32)
def _read_once(folder: Path, _config_changed: int, _weights_changed: int) -> SavedAdapter:
    file = folder / ADAPTER_CONFIG
    try:
        config = read_table(file)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}", expected="an adapter config", fix="copy the adapter again"
        ) from error
    shapes: dict[str, tuple[int, ...]] = {}
    with suppress(OSError, ValueError, TypeError, KeyError):  # the engine says what is wrong with the weights
        shapes = _header(folder / ADAPTER_WEIGHTS)
    return SavedAdapter(folder, config, shapes)


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, HEADER_BYTES)))
    return {name: tuple(each["shape"]) for name, each in header.items() if name != "__metadata__"}


def continued(recipe: Recipe, arch: Architecture) -> Recipe:
    """The recipe with the [method] that its run has: where an adapter is continued, the adapter's own. All of it counts
    as trained: matrices that method.freeze names are in memory, too."""
    adapter = find_adapter(recipe.model) if recipe.method.kind == "lora" else None
    if adapter is None or not adapter.is_lora:
        return recipe
    method = method_of(recipe.method, adapter, arch).model_copy(update={"freeze": []})
    return recipe.model_copy(update={"method": method})


def require_closed_form(model: Model, arch: Architecture) -> None:
    """Raise UnknownArchitectureError if the adapter that is continued has no memory formula."""
    adapter = find_adapter(model)
    if adapter is not None and (reason := _no_closed_form(adapter, arch)) is not None:
        raise UnknownArchitectureError(
            f"no memory formula for the adapter {adapter.folder}, which {reason}",
            fix="simulate it: tunedeck plan with the same arguments and --exact",
        )


def method_of(method: Method, adapter: SavedAdapter, arch: Architecture) -> Method:
    """`method` with what the adapter determines; modules of `also_train` are added to the adapter's."""
    adapted = adapter.adapted
    also = [name for name in parameter_names(arch) if _is_whole(name, adapter.whole_modules)]
    changes = {
        **values_of(adapter),
        "targets": _shortened(adapted, adaptable_names(arch)) or method.targets,
        "exclude": [],
        "layers": [],
        "also_train": list(dict.fromkeys([*also, *method.also_train])),
    }
    return method.model_copy(update=changes)


def values_of(adapter: SavedAdapter) -> dict[str, Any]:
    """The values of those keys of [method] that need no names of modules."""
    config = adapter.config
    return {
        "rank": adapter.rank,
        "alpha": float(config.get("lora_alpha") or adapter.rank),
        "dropout": float(config.get("lora_dropout") or 0.0),
        "dora": bool(config.get("use_dora")),
        "rslora": bool(config.get("use_rslora")),
    }


def _is_whole(parameter: str, modules: Iterable[str]) -> bool:
    owner = parameter.rpartition(".")[0]
    return any(owner == name or owner.endswith(f".{name}") or owner.startswith(f"{name}.") for name in modules)


def _shortened(names: list[str], known: Iterable[str]) -> list[str]:
    """Patterns of method.targets for `names`: their last parts, if these select the same of `known`."""
    last = sorted({name.rpartition(".")[2] for name in names})
    return last if {name for name in known if name.rpartition(".")[2] in last} == set(names) else names


def _no_closed_form(adapter: SavedAdapter, arch: Architecture) -> str | None:
    """Why the memory formula does not apply to the adapter, as the end of a sentence; None if it does."""
    config = adapter.config
    if not adapter.is_lora:
        return f"has type {adapter.kind}"
    if not adapter.shapes:
        return None
    if config.get("rank_pattern") or config.get("layer_replication"):
        return "has different ranks for some layers"
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        return "trains biases"
    unknown = set(adapter.adapted) - set(adaptable_names(arch))
    return f"is on {sorted(unknown)[0]}" if unknown else _odd_shape(adapter, arch)


def _odd_shape(adapter: SavedAdapter, arch: Architecture) -> str | None:
    """The same for tensors of linear layers, and modules trained in full, that are not as the model's."""
    parameters = parameters_by_name(arch)
    for module in adapter.adapted:
        linear = parameters.get(f"{module}.weight")
        if linear is None:
            continue  # experts
        pair = [adapter.shapes.get(f"{PREFIX}{module}.lora_{side}.weight") for side in "AB"]
        if pair != linear.adapter_shapes(adapter.rank):
            return f"has matrices with other shapes on {module}"
    for name, shape in adapter.shapes.items():
        bare = name.removeprefix(PREFIX)
        if bare in parameters and shape != parameters[bare].shape:
            return f"has a different shape of {bare}"
    return None
