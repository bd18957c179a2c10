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
    """Nothing but the device."""
    return []


def prove(setup: TrainingSetup) -> str:
    """Send several tensors one after another without waiting, then read all of them back."""
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
    """Copy from ordinary memory, which waits for the device."""
    setup.context.device.stop_pinning()
    return "copies to the device go through ordinary memory"
