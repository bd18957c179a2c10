"""Another process on the metered device: a file with one number, the bytes that it holds there at this moment.

On a shared card the room a run has comes and goes with its neighbours. Here that can be rehearsed: an engine started
with $TUNEDECK_NEIGHBOUR has so much less to allocate from. Nothing else of the device is known here, nor torch.

Try: `python -m engine.device.co_tenant neighbour.count`, and beside it
`TUNEDECK_NEIGHBOUR=neighbour.count tunedeck train -p demo -r demo`; then type 0.02 to hold 0.02 GiB, 0 to let go.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from engine.errors import EnvironmentProblem

NEIGHBOUR_VARIABLE = "TUNEDECK_NEIGHBOUR"
COUNT_BYTES = 8
"""One little-endian unsigned number."""


class SharedCount:
    """Bytes held by the neighbour, in memory that both processes map: read at every allocation."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an existing file. Raises EnvironmentProblem where there is none, or one of another size."""
        try:
            with path.open("r+b") as file:
                return cls(mmap.mmap(file.fileno(), COUNT_BYTES))
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(
                f"${NEIGHBOUR_VARIABLE} names {path}, which cannot be used: {error}",
                expected=f"a file of {COUNT_BYTES} bytes",
                fix=f"start the neighbour first (python -m engine.device.co_tenant), or unset {NEIGHBOUR_VARIABLE}",
            ) from error

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the file, holding nothing, and map it."""
        path.write_bytes(bytes(COUNT_BYTES))
        return cls.open(path)

    @property
    def held_bytes(self) -> int:
        """What the neighbour holds now."""
        return int.from_bytes(self._memory[:COUNT_BYTES], "little")

    def hold(self, size_bytes: int) -> None:
        """Hold this much from now on."""
        self._memory[:COUNT_BYTES] = size_bytes.to_bytes(COUNT_BYTES, "little")


def live_beside(path: Path, amounts: Iterable[str]) -> None:
    """Hold each of `amounts` (GiB) until the next comes; nothing after the last."""
    count = SharedCount.create(path)
    try:
        for amount in amounts:
            count.hold(int(float(amount) * 2**30))
    finally:
        count.hold(0)


if __name__ == "__main__":
    live_beside(Path(sys.argv[1]), sys.stdin)
