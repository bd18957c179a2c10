"""Compares the tensors of a base's safetensors files with the weights that its config describes, from headers alone.

The engine does so exactly, with the names of transformers' class (`engine.model.surplus`). This is what can be said
before the model is loaded, for families with a memory formula.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.model_folder import INDEX, WHOLE, quantisation_of, tensors_in
from engine.architecture.parameters import layer_parameters
from engine.architecture.positions import text_of
from engine.errors import UsageError
from engine.journal.files import read_table

IN_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)$")
NOT_OF_THE_DECODER = re.compile("vision|visual|audio|speech|mtp|nextn")
PREDICTING = re.compile("nextn|mtp")
"""In keys of a config that count layers of multi-token prediction behind the last one, and in names of its tensors."""


class StoredTensor(NamedTuple):
    """A tensor in a layer of the decoder."""

    name: str
    layer: int
    place: str
    """Its name in the layer."""
    shape: tuple[int, ...]


def refuse_other_model(arch: Architecture, config: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError if tensors in `folder` have no place in the model that its config describes: a layer behind the
    last one, a bias of a layer without one, or another shape. Mixtures are left to the engine where experts are fused,
    and so are quantised weights."""
    if quantisation_of(config, folder) is not None:
        return
    found = _misfits(arch, _predicting_layers(config), folder, _stamp(folder))
    if found:
        name, reason = found[0]
        raise UsageError(
            f"{len(found)} tensors of {folder}, such as {name}, do not fit the model that its config.json describes "
            f"({reason}): the files belong to another model",
            expected="a config.json that has a place for each weight of the files",
            fix="take the config.json that belongs to the files",
        )


@lru_cache(maxsize=64)
def _misfits(arch: Architecture, more: int, folder: Path, stamp: int) -> list[tuple[str, str]]:
    """(name, reason) of each tensor that has no place. `more`: layers that predict further tokens."""
    known = {each.name: each.shape for dense in (True, False) if dense or arch.experts is not None
             for each in layer_parameters(arch, dense)}  # fmt: skip
    stored = list(_in_layers(folder, stamp))
    special = {each.layer for each in stored if each.place not in known}
    found = []
    for each in stored:
        bare = each.place.removesuffix(".bias")
        if each.layer >= arch.layers:
            if each.layer >= arch.layers + more and each.layer not in special:
                found.append((each.name, f"a layer behind the last of {arch.layers}"))
        elif each.place in known:
            if each.shape != known[each.place] and arch.experts is None:
                found.append((each.name, f"it is {list(each.shape)}, and {list(known[each.place])} there"))
        elif bare != each.place and f"{bare}.weight" in known:
            found.append((each.name, f"{bare} has no bias"))
    return found


def note_on_surplus(config: Mapping[str, Any], folder: Path | None) -> str | None:
    """A sentence on tensors of multi-token prediction in `folder`, which are not trained; None without any."""
    if folder is None:
        return None
    layers, more, stamp = text_of(config).get("num_hidden_layers"), _predicting_layers(config), _stamp(folder)
    names = [name for name in _tensors(folder, stamp) if name.startswith("mtp.") or ".mtp." in name]
    if isinstance(layers, int) and more:
        behind = range(layers, layers + more)
        names += [each.name for each in _in_layers(folder, stamp) if each.layer in behind]
    if not names:
        return None
    return (
        f"{len(names)} tensors for multi-token prediction, such as {names[0]}, are not trained: a merged or full "
        "result has them as the base does, and speculative decoding accepts fewer of them"
    )


def _stamp(folder: Path) -> int:
    """Changes with the weights."""
    found = [(folder / name).stat().st_mtime_ns for name in (INDEX, WHOLE) if (folder / name).is_file()]
    return max(found, default=0)


@lru_cache(maxsize=16)
def _tensors(folder: Path, _stamp: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by name."""
    index = folder / INDEX
    listed = sorted({str(name) for name in read_table(index)["weight_map"].values()}) if index.is_file() else [WHOLE]
    return {name: shape for file in listed for name, shape in tensors_in(folder / file).items()}


def _in_layers(folder: Path, stamp: int) -> Iterator[StoredTensor]:
    for name, shape in _tensors(folder, stamp).items():
        match = IN_A_LAYER.search(name)
        if match is not None and not NOT_OF_THE_DECODER.search(name):
            yield StoredTensor(name, int(match[1]), match[2], shape)


def _predicting_layers(config: Mapping[str, Any]) -> int:
    return sum(
        value for key, value in text_of(config).items()
        if PREDICTING.search(key) and isinstance(value, int) and not isinstance(value, bool)
    )  # fmt: skip
