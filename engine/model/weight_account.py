"""The account of weights that are read: files, tensors, and the tensors that are not loaded, by name with the reason.
It is written to the journal (event `weights`), and `tunedeck show` has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel


@dataclass(frozen=True)
class WeightAccount:
    """What was read of the weight files of a model or an adapter."""

    source: str
    """ "base", "adapter" or "checkpoint"."""
    path: str
    files: tuple[str, ...]
    tensors: int
    """Tensors in the files."""
    loaded: int
    """Those whose values are in the model."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """The others: name = reason."""

    def event(self) -> dict[str, Any]:
        """Return the fields of the event `weights`."""
        return {**vars(self), "files": list(self.files), "unread": dict(self.unread)}

    def sentences(self) -> list[str]:
        """Return a sentence for each reason why tensors were not read."""
        found = []
        for reason in dict.fromkeys(self.unread.values()):
            names = [name for name, each in self.unread.items() if each == reason]
            found.append(f"{self.path}: {len(names)} tensors are not read, such as {names[0]}: {reason}")
        return found


def account_of_base(model: PreTrainedModel, folder: Path, path: str, unexpected: Iterable[str]) -> WeightAccount:
    """The account of a base read from `folder`. `unexpected`: names that transformers reported as left over; those that
    its class leaves out without a report are found by the class's own patterns."""
    files = sorted(folder.glob("*.safetensors"))
    names = [name for file in files for name in _names(file)]
    named = set(unexpected)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept |= {name for name, _ in model.named_buffers()}
    kind = type(model).__name__
    unread = {name: f"{kind} has no weight of this name" for name in names if name in named}
    for name in names:
        if name not in kept and any(pattern.search(name) for pattern in ignored):
            unread[name] = f"transformers leaves it out of {kind}"
    return WeightAccount("base", path, tuple(file.name for file in files), len(names), len(names) - len(unread), unread)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
