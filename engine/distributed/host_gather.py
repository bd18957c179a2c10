"""Gathers a small JSON value of every rank on the host, in one round trip and within a time limit.

Every buffer is allocated once, so a vote about an allocation failure cannot fail for want of memory itself. A vote that
is not answered in time, or whose connection breaks, means a lost rank: the attempt ends everywhere.

Gradients are exchanged elsewhere (`engine.distributed.gradient_all_reduce`).

Try: `pytest tests/distributed/test_ranks.py`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.device.oom import classify
from engine.errors import TunedeckError

SLOT_BYTES = 64 * 1024
"""Room for one rank's value: a learned budget with its remedies is about 2 KiB; a round of 8 ranks stays at 0.5 MiB."""

HEADER_BYTES = 4


# torch 2.13 renamed all_gather_into_tensor and warns about the old name; torch 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LostRankError(TunedeckError):
    """Another rank is gone or does not answer; the run can only continue in a new attempt from the last checkpoint."""


@contextmanager
def raising_lost_rank() -> Iterator[None]:
    """Inside the block, turn errors of a collective into LostRankError: gloo and NCCL raise RuntimeError with many
    different messages. Out-of-memory errors and errors after which the device is unusable are raised unchanged."""
    try:
        yield
    except RuntimeError as error:
        if classify(error) or isinstance(error, torch.AcceleratorError):
            raise
        raise LostRankError(
            f"another rank is gone, stopped or stuck: {str(error).splitlines()[0][:300]}",
            fix="the run goes on from its last checkpoint",
        ) from error


class HostGather:
    """A gloo group with preallocated buffers for votes. All ranks of the group call `gather` in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._sent = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        self._received = torch.zeros(SLOT_BYTES * group.size(), dtype=torch.uint8)
        self._sent_bytes = self._sent.numpy()
        self._received_bytes = self._received.numpy().reshape(group.size(), SLOT_BYTES)

    def gather(self, value: Any) -> list[Any]:
        """Exchange `value` (JSON); returns every rank's value, in the order of ranks.

        Raises:
            LostRankError: a rank did not answer within the group's time limit.
            ValueError: the value is larger than SLOT_BYTES.
        """
        text = json.dumps(value).encode("ascii")
        if len(text) > SLOT_BYTES - HEADER_BYTES:
            raise ValueError(f"a vote of {len(text)} bytes; a slot has {SLOT_BYTES}")
        self._sent_bytes[:HEADER_BYTES] = np.frombuffer(len(text).to_bytes(HEADER_BYTES, "little"), np.uint8)
        self._sent_bytes[HEADER_BYTES : HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        with raising_lost_rank():
            _all_gather(self._received, self._sent, group=self.group)
        return [_read(slot.tobytes()) for slot in self._received_bytes]


def _read(slot: bytes) -> Any:
    length = int.from_bytes(slot[:HEADER_BYTES], "little")
    return json.loads(slot[HEADER_BYTES : HEADER_BYTES + length])
