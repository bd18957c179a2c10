"""Host memory kept back for checkpoints: a run that ends for want of memory can still write its last one.

The libraries that write files are partly Rust, which ends the process when an allocation fails (seen under a limit on
address space); no `except` helps against that. So room is kept from the start, and asked for before they are called.

Try: `pytest tests/train/test_limits.py`
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.device.base import Device

RESERVE_BYTES = 12 * 2**20
"""Never touched, so it costs address space and no memory. safetensors writes through a buffer of 1 MiB; hashing, JSON
and the tokenizer's files come to a few more."""
NEEDED_BYTES = 4 * 2**20


class HostReserve:
    """Address space that nothing else can take until it is lent."""

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None
        self._take()

    @contextmanager
    def lent(self, device: Device) -> Iterator[None]:
        """Give the reserve to what runs inside, and take it back afterwards where it is still to be had.

        Raises RuntimeError, as any failed host allocation does, where even with it too little is left to go on.
        """
        self._give()
        try:
            with device.host_region():
                torch.empty(NEEDED_BYTES, dtype=torch.uint8)  # asked for and dropped: what follows finds it free
            yield
        finally:
            self._take()

    def _take(self) -> None:
        try:
            self._held = mmap.mmap(-1, RESERVE_BYTES)
        except OSError:
            self._held = None

    def _give(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
