"""Weights in shards and files: loaded one tensor at a time through host memory, so that no device needs more memory
than for training, and put together to be saved, so that no rank receives the whole model.

A rank reads its own rows of what all ranks find in safetensors files; rank 0 sends the rest. transformers maps
safetensors files into memory. A weight that it took over unchanged (not renamed into another layout, merged, converted
or changed in place) lies in such a mapping, at the address of its tensor in the file. Linux says in /proc/self/maps
which file an address belongs to; elsewhere rank 0 sends all weights.

To save, in each round every rank that writes a file receives one whole tensor, and holds no more than that and its
parts of those of the round. `torch.distributed.checkpoint` would not hold to that: it sends no parts, but has every
rank write its own, and reads all of them again to join them; 0-dimensional tensors become zeros on the way.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engine.device.base import Device
from engine.distributed.ranks import Ranks
from engine.distributed.votes import VotedGroup, raising_lost_rank
from engine.errors import UsageError
from engine.journal.event_text import format_bytes


def own_rows(whole: DTensor) -> slice:
    """The rows (first dimension) of the whole tensor that this rank's shard holds; empty if there are fewer rows than
    ranks. torch gives each rank as many rows, the last ones fewer or none."""
    first, length = 0, len(whole)
    for dimension, placement in enumerate(whole.placements):
        if placement.is_shard():
            most = -(-len(whole) // whole.device_mesh.size(dimension))
            first = min(most * whole.device_mesh.get_local_rank(dimension), len(whole))
            length = min(most, len(whole) - first)
    return slice(first, first + length)


def part_of(whole: DTensor, part: Tensor) -> DTensor:
    """`part` as this rank's shard of a tensor that is sharded like `whole`."""
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def exchange(
    rounds: Iterable[Sequence[Tensor]], ranks: Ranks, voted_group: VotedGroup, device: Device
) -> Iterator[Tensor]:
    """For each of `rounds`, which holds a tensor for each of the first ranks: yield this rank's tensor, whole and in
    host memory; nothing on a rank without one. A tensor that is not sharded is copied on its rank. All ranks must
    iterate to the end, over the same rounds.

    Raises PeerFailedError, LostRankError.
    """
    for tensors in rounds:
        with device.host_region(), torch.no_grad():
            whole = _one_round(tensors, ranks, voted_group, device)
        if whole is not None:
            yield whole
            del whole


def _one_round(tensors: Sequence[Tensor], ranks: Ranks, voted_group: VotedGroup, device: Device) -> Tensor | None:
    sent = [_bytes_here(tensor, device) for tensor in tensors]
    sent += [torch.empty(0, dtype=torch.uint8)] * (ranks.size - len(sent))
    sizes = list(map(len, sent))
    parts = torch.cat(sent)
    del sent
    mine = tensors[ranks.rank] if ranks.rank < len(tensors) else None
    expected = _sizes_of_parts(mine, ranks.size)
    received = torch.empty(sum(expected), dtype=torch.uint8)
    voted_group.ready()
    with raising_lost_rank():
        dist.all_to_all_single(received, parts, expected, sizes)
    if mine is None:
        return None
    return received.view(mine.dtype).view(mine.shape) if isinstance(mine, DTensor) else device.staged(mine)


def _bytes_here(tensor: Tensor, device: Device) -> Tensor:
    """This rank's part of a sharded tensor as bytes, because gloo does not know every dtype; none of any other."""
    if not isinstance(tensor, DTensor):
        return torch.empty(0, dtype=torch.uint8)
    return device.staged(tensor.to_local()).contiguous().view(-1).view(torch.uint8)


def _sizes_of_parts(tensor: Tensor | None, ranks: int) -> list[int]:
    """Bytes of each rank's part of `tensor` (see `own_rows`)."""
    if not isinstance(tensor, DTensor):
        return [0] * ranks
    rows = -(-len(tensor) // ranks)
    row_bytes = tensor.itemsize * (tensor.numel() // len(tensor))
    return [row_bytes * max(0, min(rows, len(tensor) - rows * rank)) for rank in range(ranks)]


MAPS = Path("/proc/self/maps")

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights by their names in safetensors files."""

MOST_HEADER_BYTES = 100_000_000
"""The longest header that safetensors itself reads."""

COMPARED_BYTES = 256
"""Bytes at either end of a mapped tensor that are compared with the file."""

PROBES, PROBE_BYTES = 16, 4096
"""Pieces of a file that are compared between ranks, and the size of each. Two files of as many bytes that differ in
their weights differ nearly everywhere."""

SLOTS_AT_ONCE = 200
"""Slots whose facts fit one exchange (`engine.distributed.votes.SLOT_BYTES`): a layer with experts of their own
has more."""

Place = tuple[int, str]
"""A tensor in a file: the file's number, the same on all ranks, and the tensor's name in it."""


class WeightFiles:
    """The files that rank 0's weights come from, as far as every rank finds them. All ranks create it together."""

    def __init__(self, ranks: Ranks, tensors: Iterable[Tensor]) -> None:
        """`tensors`: the weights that rank 0 has loaded; those of other ranks do not count. Raises LostRankError."""
        mapped = mapped_tensors(tensors) if ranks.is_rank0 else {}
        paths = sorted({path for path, _ in mapped.values()})
        self._paths = agreed_paths(paths, ranks)
        self.missing = [path for path in paths if path not in self._paths]
        """On rank 0, the files that another rank does not find as rank 0 does."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._places = {key: (numbers[path], name) for key, (path, name) in mapped.items() if path in numbers}

    def place_of(self, tensor: Tensor) -> Place | None:
        """On rank 0: where every rank finds the weight `tensor`; None if it must be sent."""
        return self._places.get(id(tensor))

    def read(self, place: Place, rows: slice) -> Tensor:
        """Read rows (first dimension) of a tensor into host memory.

        Raises:
            UsageError: the file is damaged, or was changed since the run began to load it.
        """
        path, name = self._paths[place[0]], place[1]
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_slice(name)[rows]
                return found
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"cannot read {name} in {path}: {error}",
                expected="the safetensors file as it was when loading began",
                fix="wait until the download or export is complete, or repeat it, then start the run",
            ) from error


def agreed_paths(paths: list[str], ranks: Ranks) -> list[str]:
    """Those of rank 0's `paths` under which all ranks find equal files, on all ranks. Raises LostRankError."""
    agreed = []
    for number in range(ranks.broadcast_object(len(paths))):
        path = ranks.broadcast_object(paths[number] if ranks.is_rank0 else None)
        found = ranks.all_gather_object(fingerprint(path))
        if found[0] is not None and found == [found[0]] * ranks.size:
            agreed.append(path)
    return agreed


def fingerprint(path: str) -> str | None:
    """A hash of the file's size and of pieces of it, the header's beginning among them, that tells files apart without
    reading them; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            digest = hashlib.sha256(str(size).encode())
            for number in range(PROBES):
                file.seek(max(0, size - PROBE_BYTES) * number // (PROBES - 1))
                digest.update(file.read(PROBE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def mapped_tensors(tensors: Iterable[Tensor]) -> dict[int, tuple[str, str]]:
    """Those of `tensors` that are whole tensors of mapped safetensors files: `id` of the tensor = (the file's path, the
    tensor's name in it)."""
    mappings = _mappings()
    starts = [start for start, *_ in mappings]
    in_file = defaultdict[str, list[tuple[int, Tensor]]](list)
    for tensor in tensors:
        address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0
        at = bisect_right(starts, address) - 1
        if at >= 0 and address < mappings[at][1] and tensor.numel():
            start, _, offset, path = mappings[at]
            in_file[path].append((address - start + offset, tensor))
    found = {}
    for path, placed in in_file.items():
        names = _contents(path)
        with open(path, "rb") as file:
            for begin, tensor in placed:
                name = names.get((begin, tensor.dtype, *tensor.shape))
                if name is not None and _looks_unchanged(tensor, begin, file):
                    found[id(tensor)] = path, name
    return found


def _looks_unchanged(tensor: Tensor, begin: int, file: BinaryIO) -> bool:
    """Whether the first and last values of a mapped tensor are those of the file, where its bytes begin at `begin`:
    after a change in place, the mapping differs from the file."""
    values = tensor.detach().view(-1).view(torch.uint8)
    for first in {0, max(0, len(values) - COMPARED_BYTES)}:
        file.seek(begin + first)
        here = bytes(values[first : first + COMPARED_BYTES].tolist())
        if file.read(len(here)) != here:
            return False
    return True


def _contents(path: str) -> dict[tuple[Any, ...], str]:
    """Names of the tensors in a safetensors file by the position of the first byte, dtype and dimensions; none of any
    other or unreadable file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= MOST_HEADER_BYTES else {}
    except (OSError, ValueError):
        return {}
    header.pop("__metadata__", None)
    return {
        (8 + length + facts["data_offsets"][0], DTYPES.get(facts["dtype"]), *facts["shape"]): name
        for name, facts in header.items()
    }


def _mappings() -> list[tuple[int, int, int, str]]:
    """(first address, address after the last, position in the file of the first byte, path) of all mapped parts of
    files, in order of addresses. Empty where the system does not say."""
    found = []
    for line in MAPS.read_text().splitlines() if MAPS.is_file() else []:
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end, int(offset, 16), path[0]))
    return found


class WeightFiller:
    """Fills modules with weights and buffers, in two steps around the sharding of each group of modules.

    Before it, what all ranks find in a file becomes a parameter on "meta", without memory; all else becomes a copy of
    rank 0's tensor. After it, every rank reads its own rows of what is in files.
    """

    def __init__(self, ranks: Ranks, voted_group: VotedGroup, device: Device, files: WeightFiles) -> None:
        self._ranks, self._voted_group, self._device, self._files = ranks, voted_group, device, files
        self._filled: set[int] = set()
        self._unread: list[tuple[list[Slot], Place]] = []
        self.sent_bytes = self.read_bytes = 0
        """Bytes of the tensors that rank 0 sent so far, and of those that all ranks together read from files."""

    @contextmanager
    def __call__(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Fill what is not filled yet in and below `modules`, which are sharded inside the block. All ranks call it.
        Raises PeerFailedError or LostRankError, or UsageError: a file is damaged."""
        self._before_sharding(modules)
        yield
        self._after_sharding()

    def summary(self) -> str:
        """On rank 0: how many bytes of weights came which way so far, and why not all were read from files."""
        text = f"{format_bytes(self.read_bytes)} of weights read from files, where each rank reads its own rows"
        if not self.sent_bytes:
            return text
        text += f"; {format_bytes(self.sent_bytes)} sent by rank 0"
        if self._files.missing:
            return f"{text}, because not all ranks have the same {self._files.missing[0]} as rank 0"
        return (
            text
            if self.read_bytes
            else f"{text}, because no weight has the same layout in memory as in the safetensors files"
        )

    def _before_sharding(self, modules: Sequence[nn.Module]) -> None:
        slots = list(_slots(modules, self._filled))
        self._voted_group.ready()
        received = [facts for first in range(0, len(slots), SLOTS_AT_ONCE) for facts in self._facts(slots[first:])]
        came: dict[int, Tensor] = {}
        uses = defaultdict[int, list[Slot]](list)
        with self._device.host_region(), torch.no_grad():
            for slot, (dtype, shape, place) in zip(slots, received, strict=True):
                key = id(slot.tensor)
                if key not in came and place is not None:
                    came[key] = _empty(slot.tensor, dtype, shape, "meta")
                    self._unread.append((uses[key], place))
                elif key not in came:
                    came[key] = self._sent(slot.tensor, dtype, shape)
                    self.sent_bytes += came[key].nbytes
                uses[key].append(slot)
                slot.table[slot.name] = came[key]
        self._filled |= {id(tensor) for tensor in came.values()}

    def _facts(self, slots: Sequence[Slot]) -> list[Any]:
        """Rank 0's (dtype, shape, place in a file or None) of the first few of `slots`."""
        facts = [(str(slot.tensor.dtype), list(slot.tensor.shape), self._files.place_of(slot.tensor))
                 for slot in slots[:SLOTS_AT_ONCE]]  # fmt: skip
        return list(self._ranks.broadcast_object(facts))

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
        return part_of(empty, part)

    def _sent(self, tensor: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
        """Broadcast `tensor`, of `dtype` and `shape` on rank 0; other ranks return a copy in host memory."""
        here = tensor if self._ranks.is_rank0 else _empty(tensor, dtype, shape, "cpu")
        self._voted_group.ready()
        with raising_lost_rank():
            # As bytes, because gloo does not know every dtype.
            dist.broadcast(here.detach().contiguous().view(-1).view(torch.uint8), src=0)
        return here


class Slot(NamedTuple):
    """Where a module holds a tensor: in `table`, its parameters or buffers, under `name`."""

    table: dict[str, Any]
    name: str
    tensor: Tensor


def _empty(like: Tensor, dtype: str, shape: Sequence[int], place: str) -> Tensor:
    """A tensor, or a parameter if `like` is one, without values; `dtype` as torch writes it, such as "torch.int64"."""
    made = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=place)
    return Parameter(made, like.requires_grad) if isinstance(like, Parameter) else made


def _slots(modules: Iterable[nn.Module], filled: set[int]) -> Iterator[Slot]:
    """The slots of every parameter and buffer in or below `modules` that is not filled yet."""
    for module in modules:
        for inner in module.modules():
            for table in (inner._parameters, inner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, DTensor) and id(tensor) not in filled:
                        yield Slot(table, name, tensor)
