"""Moves weights from rank 0's host memory to the shards of all ranks when a model is loaded, and back when it is saved.
Tensors are moved one at a time through host memory on every rank, so that no device needs more memory than for
training.

Try: `pytest tests/distributed/test_sharded_model.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engine.device.base import Device
from engine.distributed.host_gather import raising_lost_rank
from engine.distributed.ranks import Ranks
from engine.distributed.voted_group import VotedGroup

Key = TypeVar("Key")

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
                                          torch.int32, torch.uint8, torch.bool)}
"""Dtypes of weights and buffers, by the names that rank 0 sends to the others."""


class WeightBroadcaster:
    """Fills modules with rank 0's weights and buffers. On other ranks the modules have meta tensors, without memory,
    until they are filled."""

    def __init__(self, ranks: Ranks, voted_group: VotedGroup, device: Device) -> None:
        self._ranks, self._joint, self._device = ranks, voted_group, device
        self._filled: set[int] = set()

    def __call__(self, modules: Sequence[nn.Module]) -> None:
        """Fill all parameters and buffers in and below `modules` that are not filled yet. All ranks call it.

        Raises PeerFailedError, LostRankError.
        """
        places = list(_places(modules, self._filled))
        self._joint.ready()
        received = self._ranks.broadcast_object([[str(tensor.dtype), list(tensor.shape)] for _, _, tensor in places])
        came: dict[int, Tensor] = {}
        with self._device.host_region(), torch.no_grad():
            for (table, name, tensor), (dtype, shape) in zip(places, received, strict=True):
                if id(tensor) not in came:
                    came[id(tensor)] = self._one(tensor, DTYPES[dtype], shape)
                table[name] = came[id(tensor)]
        self._filled |= {id(tensor) for tensor in came.values()}

    def _one(self, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Broadcast one tensor from rank 0; returns the tensor itself on rank 0, a copy in host memory on the other
        ranks. `dtype` and `shape` are those on rank 0."""
        sent = tensor.detach().contiguous() if self._ranks.is_rank0 else torch.empty(shape, dtype=dtype)
        self._joint.ready()
        with raising_lost_rank():
            dist.broadcast(_as_bytes(sent), src=0)
        if self._ranks.is_rank0:
            return tensor
        return Parameter(sent, tensor.requires_grad) if isinstance(tensor, Parameter) else sent


def _places(modules: Iterable[nn.Module], filled: set[int]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (dict that holds the tensor, its name there, tensor) for every parameter and buffer in or below `modules`
    that is not filled yet."""
    for module in modules:
        for inner in module.modules():
            for table in (inner._parameters, inner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, DTensor) and id(tensor) not in filled:
                        yield table, name, tensor


def gather_on_rank0(
    keyed: Iterable[tuple[Key, Tensor]], ranks: Ranks, voted_group: VotedGroup, device: Device
) -> Iterator[tuple[Key, Tensor | None]]:
    """Gather sharded tensors one after another; yields (key, the whole tensor in host memory on rank 0, None on other
    ranks). A tensor that is not sharded is copied to the host on every rank. All ranks must iterate to the end.

    Raises PeerFailedError, LostRankError.
    """
    for key, tensor in keyed:
        with device.host_region(), torch.no_grad():
            if isinstance(tensor, DTensor):
                yield key, _gathered(tensor, ranks, voted_group, device)
            else:
                yield key, device.staged(tensor)


def _gathered(tensor: DTensor, ranks: Ranks, voted_group: VotedGroup, device: Device) -> Tensor | None:
    """Gather one sharded tensor in rank 0's host memory; returns None on the other ranks. torch splits the first
    dimension, and the last part may be smaller."""
    rows = -(-tensor.shape[0] // ranks.size)
    part = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype)
    here = tensor.to_local()
    part[: len(here)] = device.staged(here)
    whole = torch.empty((rows * ranks.size, *tensor.shape[1:]), dtype=tensor.dtype) if ranks.is_rank0 else None
    parts = [_as_bytes(each) for each in whole.chunk(ranks.size)] if whole is not None else None
    voted_group.ready()
    with raising_lost_rank():
        dist.gather(_as_bytes(part), parts, dst=0)
    return None if whole is None else whole[: tensor.shape[0]]


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of the tensor's memory as uint8, because gloo does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
