"""Reads tensors of safetensors files into a model, each rank of a sharded model its own rows only.

Try: `python -m pytest tests/model/test_save.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Protocol

from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.distributed.own_rows import own_rows
from engine.errors import UsageError


class SavedTensor(Protocol):
    """A tensor in a file, as `safe_open(...).get_slice(name)` returns it. What is indexed is read."""

    def get_shape(self) -> list[int]:
        """The tensor's shape."""

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read these rows, or all of them (`...`)."""


def saved_names(folder: Path) -> Iterator[str]:
    """Yield the names of all tensors in the safetensors files of `folder`."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def saved_tensors(folder: Path) -> Iterator[tuple[str, SavedTensor]]:
    """Yield (name, tensor) for all tensors in the safetensors files of `folder`. Nothing of a tensor is read before it
    is indexed."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                yield name, file.get_slice(name)


def read_saved(target: Tensor, saved: SavedTensor, name: str) -> None:
    """Copy a saved tensor into `target`; into a sharded one only this rank's rows, and only they are read.

    Raises:
        UsageError: the shapes differ.
    """
    _expect_shape(target, saved.get_shape(), name)
    if isinstance(target, DTensor):
        target.to_local().copy_(saved[own_rows(target)])
    else:
        target.copy_(saved[...])


def copy_whole(target: Tensor, source: Tensor, name: str) -> None:
    """Copy `source`, a whole tensor on the host, into `target`; into a sharded one only this rank's rows.

    Raises:
        UsageError: the shapes differ.
    """
    _expect_shape(target, source.shape, name)
    if isinstance(target, DTensor):
        target.to_local().copy_(source[own_rows(target)])
    else:
        target.copy_(source)


def _expect_shape(target: Tensor, saved: Sequence[int], name: str) -> None:
    if list(target.shape) != list(saved):
        raise UsageError(
            f"{name} was saved with shape {tuple(saved)}, the model has {tuple(target.shape)}",
            fix="resume with the model and method the run was started with",
        )
