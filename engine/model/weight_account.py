"""The account of weights that are read or written: files, tensors, and the tensors that are in no weight, by name with
the reason. It is written to the journal (event `weights`), and `tunedeck show` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WeightAccount:
    """What was read of the weight files of a model or an adapter, or what is in those of a result."""

    source: str
    """ "base", "adapter" or "checkpoint"; "result", "merged" or "assembled" for what was written."""
    path: str
    files: tuple[str, ...]
    tensors: int
    """Tensors in the files."""
    loaded: int
    """Those whose values are in the model."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """The others: name = reason. In a result these are copies of the base's."""
    opened: str = ""
    """How a result opens without Tunedeck, as a sentence."""

    def event(self) -> dict[str, Any]:
        """Return the fields of the event `weights`."""
        fields = {**vars(self), "files": list(self.files), "unread": dict(self.unread)}
        return fields if self.opened else {name: value for name, value in fields.items() if name != "opened"}

    def sentences(self) -> list[str]:
        """Return a sentence for each reason why tensors were not read."""
        found = []
        for reason in dict.fromkeys(self.unread.values()):
            names = [name for name, each in self.unread.items() if each == reason]
            found.append(f"{self.path}: {len(names)} tensors are not read, such as {names[0]}: {reason}")
        return found


def account_of_base(path: str, files: Mapping[str, Sequence[str]], unread: Mapping[str, str]) -> WeightAccount:
    """The account of a base. `files`: the names of the tensors in each file; `unread`: those in no weight, with the
    reason."""
    count = sum(map(len, files.values()))
    return WeightAccount("base", path, tuple(files), count, count - len(unread), unread)
