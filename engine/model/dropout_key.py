"""The key of keyed dropout, which determines the mask of one sample in one module at one step."""

from __future__ import annotations

import hashlib
import struct

RowKey = tuple[int, int]
"""Two signed 32-bit integers that determine the mask of one sample in one module at one step."""


def row_key(seed: int, step: int, sample: int, module: str) -> RowKey:
    """Return a 64-bit hash of seed, optimizer step, sample id and module name."""
    text = f"{seed}\x1f{step}\x1f{sample}\x1f{module}".encode()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())
