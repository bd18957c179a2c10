"""Proof: what goes to the device through page-locked memory arrives, and is not overwritten by what follows it.

Try: `pytest tests/train/proofs/test_state.py`
"""

from __future__ import annotations

import torch

from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup

COPIES, ELEMENTS = 4, 4099
"""Copies in flight at once: each must have a buffer of its own until it has arrived."""


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on beside the device: nothing."""
    return []


def prove(setup: TrainingSetup) -> str:
    """Copy several tensors to the device one after another without waiting, then read all of them back. Returns what
    was shown, in a few words. Raises DisprovedError if a value differs."""
    device = setup.context.device
    with device.host_region():
        sent = [torch.arange(ELEMENTS, dtype=torch.int64) * (number + 1) for number in range(COPIES)]
    arrived = [device.upload(device.pin(tensor)) for tensor in sent]
    device.synchronize()
    for number, (tensor, copy) in enumerate(zip(sent, arrived, strict=True)):
        if not torch.equal(device.download(copy), tensor):
            raise DisprovedError(f"copy {number + 1} of {COPIES} arrived with other values than were sent")
    return f"{COPIES} copies in flight arrive as they were sent"


def fall_back(setup: TrainingSetup) -> str:
    """Copy to the device from ordinary memory, during which the host waits; returns what the run does instead, in a few
    words."""
    setup.context.device.stop_pinning()
    return "copies to the device go through ordinary memory"
