"""A simulated co-tenant of the metered device: it writes the bytes that it holds into the file that TUNEDECK_NEIGHBOUR
names, and the engine subtracts them from its capacity.

Try: `python -m engine.device.co_tenant held-bytes`, and in another terminal `TUNEDECK_NEIGHBOUR=held-bytes tunedeck
train -p demo -r demo`; then type 0.02 to hold 0.02 GiB, 0 to free it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from engine.errors import EnvironmentProblem

CO_TENANT_VARIABLE = "TUNEDECK_NEIGHBOUR"
COUNT_BYTES = 8
"""Size of the co-tenant's file, which contains one little-endian unsigned number."""


class SharedByteCount:
    """Bytes that the co-tenant holds, in a mapped file that the metered device reads at every allocation."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises EnvironmentProblem: the file does not exist, or has the wrong size."""
        try:
            with path.open("r+b") as file:
                return cls(mmap.mmap(file.fileno(), COUNT_BYTES))
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(
                f"${CO_TENANT_VARIABLE} names {path}, which cannot be used: {error}",
                expected=f"a file of {COUNT_BYTES} bytes",
                fix=f"start the other process first (python -m engine.device.co_tenant), or unset {CO_TENANT_VARIABLE}",
            ) from error

    @classmethod
    def create(cls, path: Path) -> Self:
        """The file starts with a count of 0."""
        path.write_bytes(bytes(COUNT_BYTES))
        return cls.open(path)

    @property
    def held_bytes(self) -> int:
        return int.from_bytes(self._memory[:COUNT_BYTES], "little")

    def hold(self, size_bytes: int) -> None:
        self._memory[:COUNT_BYTES] = size_bytes.to_bytes(COUNT_BYTES, "little")


def hold_amounts(path: Path, amounts: Iterable[str]) -> None:
    """Hold each of `amounts` (GiB) in turn, and 0 after the last."""
    count = SharedByteCount.create(path)
    try:
        for amount in amounts:
            count.hold(int(float(amount) * 2**30))
    finally:
        count.hold(0)


if __name__ == "__main__":
    hold_amounts(Path(sys.argv[1]), sys.stdin)
