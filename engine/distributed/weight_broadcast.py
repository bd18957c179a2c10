"""Gives each rank its shards of the weights when a model is loaded, and gathers them on rank 0 when it is saved.

A rank reads its own rows of the weights that all ranks find in safetensors files; all others come from rank 0. Tensors
are moved one at a time through host memory, so that no device needs more memory than for training.

Try: `pytest tests/distributed/test_sharded_model.py`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engine.device.base import Device
from engine.distributed.host_gather import raising_lost_rank
from engine.distributed.own_rows import own_rows
from engine.distributed.ranks import Ranks
from engine.distributed.voted_group import VotedGroup
from engine.distributed.weight_files import Place, WeightFiles
from engine.journal.event_text import format_bytes

Key = TypeVar("Key")

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
                                          torch.int32, torch.uint8, torch.bool)}
"""Dtypes of weights and buffers, by the names that rank 0 sends to the others."""


SLOTS_AT_ONCE = 500
"""Slots whose facts fit one exchange (`engine.distributed.host_gather.SLOT_BYTES`): a layer with experts of their own
has more."""


class WeightFiller:
    """Fills modules with weights and buffers, in two steps around the sharding of each group of modules.

    Before it, what all ranks find in a file becomes a parameter on "meta", without memory; all else becomes a copy of
    rank 0's tensor. After it, every rank reads its own rows of what is in files. Until then, the modules of the other
    ranks have meta tensors.
    """

    def __init__(self, ranks: Ranks, voted_group: VotedGroup, device: Device, files: WeightFiles) -> None:
        self._ranks, self._joint, self._device, self._files = ranks, voted_group, device, files
        self._filled: set[int] = set()
        self._unread: list[tuple[list[Slot], Place]] = []
        self.sent_bytes = self.read_bytes = 0
        """Bytes of the tensors that rank 0 sent so far, and of those that all ranks together read from files."""

    @contextmanager
    def __call__(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Context manager: fill all parameters and buffers in and below `modules` that are not filled yet; inside, the
        modules are sharded. All ranks call it.

        Raises:
            PeerFailedError, LostRankError: another rank failed or is gone.
            UsageError: a file is damaged.
            torch.OutOfMemoryError: no memory for this rank's rows.
        """
        self._before_sharding(modules)
        yield
        self._after_sharding()

    def summary(self) -> str:
        """On rank 0: how many bytes of weights came which way so far, and why not all were read from files."""
        text = f"{format_bytes(self.read_bytes)} of weights read from files, by each rank its rows"
        if not self.sent_bytes:
            return text
        text += f"; {format_bytes(self.sent_bytes)} sent by rank 0"
        if self._files.missing:
            return f"{text}, because not all ranks find {self._files.missing[0]} as rank 0 does"
        return text if self.read_bytes else f"{text}, because no weight is in memory as it is in a safetensors file"

    def _before_sharding(self, modules: Sequence[nn.Module]) -> None:
        slots = list(_slots(modules, self._filled))
        self._joint.ready()
        received = [facts for first in range(0, len(slots), SLOTS_AT_ONCE) for facts in self._facts(slots[first:])]
        came: dict[int, Tensor] = {}
        uses = defaultdict[int, list[Slot]](list)
        with self._device.host_region(), torch.no_grad():
            for slot, (dtype, shape, place) in zip(slots, received, strict=True):
                key = id(slot.tensor)
                if key not in came and place is not None:
                    came[key] = _empty(slot.tensor, DTYPES[dtype], shape, "meta")
                    self._unread.append((uses[key], Place(*place)))
                elif key not in came:
                    came[key] = self._one(slot.tensor, DTYPES[dtype], shape)
                    self.sent_bytes += came[key].nbytes
                uses[key].append(slot)
                slot.table[slot.name] = came[key]
        self._filled |= {id(tensor) for tensor in came.values()}

    def _facts(self, slots: Sequence[Slot]) -> list[Any]:
        """Rank 0's (dtype, shape, place in a file or None) of the first few of `slots`."""
        facts: list[Any] = self._ranks.broadcast_object([
            (str(slot.tensor.dtype), list(slot.tensor.shape), self._files.place_of(slot.tensor))
            for slot in slots[:SLOTS_AT_ONCE]
        ])
        return facts

    def _after_sharding(self) -> None:
        """Read this rank's rows of the parameters on "meta". Each is replaced by one on the device, as torch expects of
        a parameter that had no memory when it was sharded."""
        for slots, place in self._unread:
            empty = slots[0].table[slots[0].name]
            assert isinstance(empty, DTensor)
            filled = Parameter(self._own_part(empty, place), empty.requires_grad)
            self.read_bytes += empty.numel() * empty.element_size()
            for slot in slots:
                slot.table[slot.name] = filled
        self._unread.clear()

    def _own_part(self, empty: DTensor, place: Place) -> DTensor:
        part = torch.empty_like(empty.to_local(), device=self._device.torch_device)
        with self._device.host_region(), torch.no_grad():
            part.copy_(self._files.read(place, own_rows(empty)))
        return DTensor.from_local(
            part, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )

    def _one(self, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Broadcast one tensor from rank 0; returns the tensor itself on rank 0, a copy in host memory on the other
        ranks. `dtype` and `shape` are those on rank 0."""
        here = tensor if self._ranks.is_rank0 else _empty(tensor, dtype, shape, "cpu")
        self._joint.ready()
        with raising_lost_rank():
            dist.broadcast(_as_bytes(here.detach().contiguous()), src=0)
        return here


class Slot(NamedTuple):
    """Where a module holds a tensor."""

    table: dict[str, Any]
    """The module's parameters or buffers, by name."""
    name: str
    tensor: Tensor


def _empty(like: Tensor, dtype: torch.dtype, shape: Sequence[int], place: str) -> Tensor:
    """A tensor, or a parameter if `like` is one, without values."""
    made = torch.empty(shape, dtype=dtype, device=place)
    return Parameter(made, like.requires_grad) if isinstance(like, Parameter) else made


def _slots(modules: Iterable[nn.Module], filled: set[int]) -> Iterator[Slot]:
    """Yield the slots of every parameter and buffer in or below `modules` that is not filled yet."""
    for module in modules:
        for inner in module.modules():
            for table in (inner._parameters, inner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, DTensor) and id(tensor) not in filled:
                        yield Slot(table, name, tensor)


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
