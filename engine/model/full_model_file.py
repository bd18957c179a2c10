"""What the weight files of a full model hold: transformers' names and shapes, which may differ from the model's own.

transformers converts some weights when it loads them (it fuses experts, say) and reverts that when it saves. Here each
tensor is converted alone, so that no rank needs the whole model in host memory to write its files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine.model.tensor_file import FileTensor

WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
"""What transformers expects in the header of a weight file."""

LARGEST_FILE_BYTES = 50 * 10**9
"""A larger model is saved in several files, as transformers does: the hub takes no larger ones."""


@dataclass(frozen=True)
class SavedPart:
    """A tensor of the model, and what is saved of it."""

    name: str
    """The tensor's name in the model's state dict."""
    entries: tuple[FileTensor, ...]
    """The tensors in the file, in order; several for fused experts."""
    model: PreTrainedModel
    as_it_is: bool
    """The file holds the tensor itself, perhaps by another name. Interleaved rows have the same shape, too."""

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def in_file(self, whole: Tensor) -> Iterator[Tensor]:
        """Yield the tensors of `entries`, computed from `whole`, the model's tensor in host memory."""
        if self.as_it_is:
            yield whole
            return
        converted = revert_weight_conversion(self.model, {self.name: whole})
        for entry in self.entries:
            yield converted[entry.name]


def saved_parts(model: PreTrainedModel) -> list[SavedPart] | None:
    """What is saved of each tensor of `model`, whole also if it is sharded: tied weights once, larger dtypes first as
    safetensors wants them. None if transformers can only convert several tensors together."""
    shown = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in _distinct(model)}
    together = revert_weight_conversion(model, dict(shown))
    names = {id(tensor): name for name, tensor in shown.items()}
    parts = [
        SavedPart(names[id(tensor)], (FileTensor.like(name, tensor),), model, True)
        for name, tensor in together.items() if id(tensor) in names
    ]  # fmt: skip
    for name in shown.keys() - {part.name for part in parts}:
        try:
            alone = revert_weight_conversion(model, {name: shown[name]})
        except ValueError:  # it lacks the others
            return None
        parts.append(SavedPart(name, tuple(FileTensor.like(*item) for item in alone.items()), model, False))
    found = {entry.name: entry for part in parts for entry in part.entries}
    if found != {name: FileTensor.like(name, tensor) for name, tensor in together.items()}:
        return None
    return sorted(parts, key=lambda part: (-part.entries[0].dtype.itemsize, -part.size_bytes, part.name))


def deal(parts: Sequence[SavedPart], ranks: int = 1) -> dict[str, list[SavedPart]]:
    """Divide `parts` among files of about the same size: {file name: what it holds}. A rank writes those number `rank`,
    `rank + ranks`, …"""
    total_bytes = sum(part.size_bytes for part in parts)
    count = min(len(parts), ranks * math.ceil(total_bytes / (ranks * LARGEST_FILE_BYTES)))
    if count == 1:
        return {WEIGHTS: list(parts)}
    stem, _, suffix = WEIGHTS.partition(".")
    return {f"{stem}-{first + 1:05d}-of-{count:05d}.{suffix}": list(parts[first::count]) for first in range(count)}


def entries_of(parts: Sequence[SavedPart]) -> list[FileTensor]:
    return [entry for part in parts for entry in part.entries]


def write_index(folder: Path, files: Mapping[str, Sequence[SavedPart]]) -> None:
    """Write the index that tells transformers in which of several files (as from `deal`) each tensor is."""
    if len(files) == 1:
        return
    entries = [(entry, file) for file, parts in files.items() for entry in entries_of(parts)]
    index = {
        "metadata": {"total_size": sum(entry.size_bytes for entry, _ in entries)},
        "weight_map": {entry.name: file for entry, file in entries},
    }
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _distinct(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the state dict that are saved, by name. Of names that share a tensor, the one is kept that
    transformers reads the others from."""
    tied, ignored = model.all_tied_weights_keys or {}, model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in ignored}
    kept: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        kept.setdefault(id(state[name]), name)
    for name in state:
        if kept[id(state[name])] == name:
            yield name, state[name]
