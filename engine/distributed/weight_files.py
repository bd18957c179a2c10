"""Which weights in rank 0's memory are tensors of safetensors files, and whether all ranks find the same files.

transformers maps safetensors files into memory. A weight that it took over unchanged (not renamed into another layout,
not merged with others, not converted to another dtype, not changed in place) lies in such a mapping, at the address of
its tensor in the file. Every rank can then read its own rows of that tensor. Linux says in /proc/self/maps which file
an address belongs to; elsewhere no weight is found.

Try: `pytest tests/distributed/test_own_rows.py`
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.distributed.ranks import Ranks
from engine.errors import UsageError

MAPS = Path("/proc/self/maps")

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Dtypes of weights by their names in safetensors files."""

MOST_HEADER_BYTES = 100_000_000
"""The longest header that safetensors itself reads."""

COMPARED_BYTES = 256
"""Bytes at either end of a mapped tensor that are compared with the file."""

PROBES, PROBE_BYTES = 16, 4096
"""Pieces of a file that are compared between ranks, spread over the file, and the size of each. Two files of as many
bytes that differ in their weights differ nearly everywhere."""


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors file: where its bytes begin in the file, and what the header says of it."""

    begin: int
    name: str
    dtype: str
    shape: list[int]


class Place(NamedTuple):
    """A tensor by the numbers of its file and of its place in the file: the same on all ranks, and short to send."""

    file: int
    tensor: int


class WeightFiles:
    """The files that weights on rank 0 come from, as far as every rank finds them. All ranks create it together, with
    the same files."""

    def __init__(self, ranks: Ranks, tensors: Iterable[Tensor]) -> None:
        """`tensors`: the weights that rank 0 has loaded; other ranks may pass none.

        Raises LostRankError.
        """
        mapped = mapped_tensors(tensors) if ranks.is_rank0 else {}
        paths = sorted({path for path, _ in mapped.values()})
        self._paths = agreed_paths(paths, ranks)
        """The files that all ranks find, in one order."""
        self.missing = [path for path in paths if path not in self._paths]
        """On rank 0, the files that another rank does not find as rank 0 does."""
        self._tensors = [contents(path) for path in self._paths]
        numbers = {path: number for number, path in enumerate(self._paths)}
        self._places = {key: Place(numbers[path], index) for key, (path, index) in mapped.items() if path in numbers}

    def place_of(self, tensor: Tensor) -> Place | None:
        """On rank 0: where every rank finds the weight `tensor` in a file; None if it must be sent."""
        return self._places.get(id(tensor))

    def read(self, place: Place, rows: slice) -> Tensor:
        """Read rows (first dimension) of a tensor; returns them on the host.

        Raises:
            UsageError: the file is damaged, or was changed since the run began to load it.
        """
        path, name = self._paths[place.file], self._tensors[place.file][place.tensor].name
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_slice(name)[rows]
                return found
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"cannot read {name} in {path}: {error}",
                expected="the safetensors file as it was when the run began to load it",
                fix="download or export the model again, and start the run when that is done",
            ) from error


def agreed_paths(paths: list[str], ranks: Ranks) -> list[str]:
    """Those of rank 0's `paths` under which all ranks find equal files, on all ranks. All ranks call this; the other
    ranks' `paths` do not count. Raises LostRankError."""
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


def mapped_tensors(tensors: Iterable[Tensor]) -> dict[int, tuple[str, int]]:
    """Find those of `tensors` that are whole tensors of safetensors files mapped into memory: `id` of the tensor = (the
    file's path, the tensor's number in `contents`)."""
    mappings = _mappings()
    starts = [mapping.start for mapping in mappings]
    in_file = defaultdict[str, list[tuple[int, Tensor]]](list)
    for tensor in tensors:
        address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0
        at = bisect_right(starts, address) - 1
        if at >= 0 and address < mappings[at].end and tensor.numel():
            in_file[mappings[at].path].append((address - mappings[at].start + mappings[at].offset, tensor))
    found = {}
    for path, placed in in_file.items():
        numbers = {(each.begin, each.dtype, *each.shape): number for number, each in enumerate(contents(path))}
        with open(path, "rb") as file:
            for begin, tensor in placed:
                number = numbers.get((begin, NAMES.get(tensor.dtype, ""), *tensor.shape))
                if number is not None and _looks_unchanged(tensor, begin, file):
                    found[id(tensor)] = path, number
    return found


def _looks_unchanged(tensor: Tensor, begin: int, file: BinaryIO) -> bool:
    """Whether a mapped tensor still has the values of the file, where its bytes begin at `begin`: after a change in
    place, the mapping differs from the file. The first and the last few values are compared."""
    values = tensor.detach().view(-1).view(torch.uint8)
    for first in {0, max(0, len(values) - COMPARED_BYTES)}:
        file.seek(begin + first)
        here = bytes(values[first : first + COMPARED_BYTES].tolist())
        if file.read(len(here)) != here:
            return False
    return True


def contents(path: str) -> list[HeaderEntry]:
    """The tensors of a safetensors file in the order of their bytes; empty for any other file, and for one that cannot
    be read."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= MOST_HEADER_BYTES else {}
    except (OSError, ValueError):
        return []
    header.pop("__metadata__", None)
    return sorted(
        HeaderEntry(8 + length + facts["data_offsets"][0], name, facts["dtype"], facts["shape"])
        for name, facts in header.items()
    )


class Mapping(NamedTuple):
    """A part of a file that is mapped into this process's memory."""

    start: int
    """The first address."""
    end: int
    """The address after the last."""
    offset: int
    """The position in the file of the first byte."""
    path: str


def _mappings() -> list[Mapping]:
    """All mapped files, in order of addresses. Empty where the system does not say."""
    if not MAPS.is_file():
        return []
    found = []
    for line in MAPS.read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(Mapping(start, end, int(offset, 16), path[0]))
    return found
