"""Reserves host memory for checkpoints, so that a run that ends out of memory can still write its last one.

The libraries that write files are partly Rust, which ends the process when an allocation fails (seen under a limit on
address space); Python code cannot catch that. So memory is reserved from the start, and released before these libraries
are called.

Try: `pytest tests/train/recovery/test_host_memory_limits.py`
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.device.base import Device

RESERVE_BYTES = 12 * 2**20
"""Size of the reserve. Its pages are never touched, so it costs address space and no memory. safetensors writes through
a buffer of 1 MiB; hashing, JSON and the tokenizer's files come to a few more."""
NEEDED_BYTES = 4 * 2**20
"""Bytes that must be available when a checkpoint is begun."""


class EmergencyHostMemory:
    """A reserved range of address space, which no other allocation can take until it is released."""

    def __init__(self) -> None:
        self._reserved: mmap.mmap | None = None
        self._reserve()

    @contextmanager
    def released(self, device: Device) -> Iterator[None]:
        """While the block runs, its allocations may use the reserved memory. It is reserved again afterwards, if it is
        still available.

        Raises RuntimeError, like any failed host allocation, if even the released memory is not enough to begin a
        checkpoint.
        """
        self._release()
        try:
            with device.host_region():
                torch.empty(NEEDED_BYTES, dtype=torch.uint8)  # freed at once: a check that this much is available
            yield
        finally:
            self._reserve()

    def _reserve(self) -> None:
        try:
            self._reserved = mmap.mmap(-1, RESERVE_BYTES)
        except OSError:
            self._reserved = None

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
