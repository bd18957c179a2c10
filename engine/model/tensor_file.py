"""Safetensors files: written and hashed one tensor after another, and read by each rank of a sharded model in its own
rows.

A file that is hashed while it is written need not be read again for the SHA-256 in a checkpoint's manifest, and its
tensors need not be in host memory together. `torch.distributed.checkpoint` reads here and does not write: its writer
holds a rank's whole file twice in host memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from engine.errors import UsageError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
"""Names of dtypes in the header of a safetensors file."""

PIECE_BYTES = 2**24
"""Bytes written and hashed at once."""

LARGE_BYTES = 2**26
"""Smaller files are hashed and written in turn, in a fraction of a second."""

FLUSH_BYTES = 2**30
"""Bytes between two flushes to the disk, so that the last is short: ranks that write together wait for each other at
the end, within a time limit."""

Hashes = dict[Path, str]
"""Path = SHA-256, in hexadecimal, of files hashed while they were written."""


class FileTensor(NamedTuple):
    """A tensor of a file: its name there, its dtype and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def like(cls, name: str, tensor: Tensor) -> FileTensor:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Sequence[FileTensor], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write the safetensors file `path`, flushed to the disk; returns its SHA-256 in hexadecimal. `tensors` yields the
    host tensor of each of `entries`, in the same order.

    Raises:
        OSError: the file cannot be written (a full disk, say).
        ValueError: `tensors` are not those of `entries`.
    """
    size_bytes = sum(entry.size_bytes for entry in entries)
    with path.open("wb") as file, HashedWriter(file, with_thread=size_bytes >= LARGE_BYTES) as writer:
        writer.write(memoryview(_header(entries, metadata or {})))
        # Not zip, which holds a tensor until it has the next one.
        remaining = iter(tensors)
        for entry in entries:
            writer.write(_bytes_of(entry, next(remaining)))
        if next(remaining, None) is not None:
            raise ValueError(f"there are more tensors than the {len(entries)} entries of {path.name}")
        writer.flush()
        return writer.hexdigest()


class HashedWriter:
    """Context manager that writes to a file and computes the SHA-256 of what is written; with `with_thread` a piece is
    hashed in a thread while it is written."""

    def __init__(self, file: BinaryIO, *, with_thread: bool) -> None:
        self._file, self._hash, self._unflushed_bytes = file, hashlib.sha256(), 0
        self._thread = _thread() if with_thread else None

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def write(self, data: memoryview) -> None:
        for first in range(0, len(data), PIECE_BYTES):
            self._write_piece(data[first : first + PIECE_BYTES])
            if self._unflushed_bytes >= FLUSH_BYTES:
                self.flush()

    def _write_piece(self, piece: memoryview) -> None:
        self._unflushed_bytes += len(piece)
        if self._thread is None:
            self._hash.update(piece)
            self._file.write(piece)
            return
        hashed = self._thread.submit(self._hash.update, piece)
        try:
            self._file.write(piece)
        finally:
            hashed.result()

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unflushed_bytes = 0

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _thread() -> ThreadPoolExecutor | None:
    """A thread that runs; None if there is no memory for its stack: what is submitted would never run then."""
    thread = ThreadPoolExecutor(1, "hash")
    try:
        thread.submit(int).result()
    except RuntimeError:  # "can't start new thread"
        return None
    return thread


def _bytes_of(entry: FileTensor, tensor: Tensor) -> memoryview:
    if FileTensor.like(entry.name, tensor) != entry:
        raise ValueError(f"expected {entry}, not {tensor.dtype} {tuple(tensor.shape)}")
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data


def _header(entries: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON that follows, in 8 bytes, then each tensor's dtype, shape and place after the header."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for entry in entries:
        end = begin + entry.size_bytes
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors' bytes begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """{name: shape of the whole tensor} for the safetensors files of `folder`, whole or of parts that several ranks
    wrote."""
    return _shapes(HuggingFaceStorageReader(str(folder)).read_metadata())


def _shapes(metadata: Metadata) -> dict[str, torch.Size]:
    saved = metadata.state_dict_metadata.items()
    return {name: tensor.size for name, tensor in saved if isinstance(tensor, TensorStorageMetadata)}


def read_tensors(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy tensors of the safetensors files of `folder` into `targets`, by name, one at a time. Of a sharded target,
    this rank's rows are read; no other rank takes part.

    Raises:
        UsageError: a shape differs.
    """
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    shapes = _shapes(metadata)
    for name, target in targets.items():
        expect_shape(target, shapes[name], name)
    # Not with torch's `load`, which sends pickles between ranks and turns every error, also of memory, into its own.
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def expect_shape(target: Tensor, saved: Sequence[int], name: str) -> None:
    """Raise UsageError unless `target` has the shape `saved`."""
    if list(target.shape) != list(saved):
        raise UsageError(
            f"{name} was saved with shape {tuple(saved)}, but the model has {tuple(target.shape)}",
            fix="resume with the model and method the run was started with",
        )
