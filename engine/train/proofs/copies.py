"""Proof: tensors copied to the device through page-locked memory have the right values, also if several copies follow
one another; so do tensors that are offloaded to the host and brought back, although the device memory that they leave
is overwritten at once, and those that are kept on the host.

Try: `pytest tests/train/proofs/test_state.py`
"""

from __future__ import annotations

import torch

from engine.device.base import Device
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup

COPIES, ELEMENTS = 4, 4099
"""Copies in flight at once: each must have a buffer of its own until it has arrived."""


def facts(setup: TrainingSetup) -> list[str]:
    """Return an empty list: the outcome depends on nothing but device and versions."""
    return []


def prove(setup: TrainingSetup) -> str:
    """Copy several tensors to the device one after another without waiting, offload and park them, and read them back.
    Returns what was shown, in a few words. Raises DisprovedError if a value differs."""
    device = setup.context.device
    with device.host_region():
        sent = [torch.arange(ELEMENTS, dtype=torch.int64) * (number + 1) for number in range(COPIES)]
    arrived = [device.upload(device.pin(tensor)) for tensor in sent]
    device.synchronize()
    for number, (tensor, copy) in enumerate(zip(sent, arrived, strict=True)):
        if not torch.equal(device.download(copy), tensor):
            raise DisprovedError(f"copy {number + 1} of {COPIES} arrived with other values than were sent")
    for number, (tensor, copy) in enumerate(zip(sent, _there_and_back(device, arrived), strict=True)):
        if not torch.equal(device.download(copy), tensor):
            raise DisprovedError(f"offloaded tensor {number + 1} of {COPIES} came back with other values")
        if not torch.equal(device.download(device.upload(device.park(copy))), tensor):
            raise DisprovedError(f"tensor {number + 1} of {COPIES}, kept on the host, has other values")
    return f"{COPIES} copies in flight arrive as they were sent, and come back from the host"


def _there_and_back(device: Device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Offload `tensors` and bring all of them back, the last first, while the next one is prefetched; returns them in
    their order. Device memory that an offload frees is overwritten. The list `tensors` is emptied."""
    copies = []
    while tensors:
        copies.append(device.offload(tensors.pop(0) + 0))
        torch.zeros(ELEMENTS, dtype=torch.int64, device=device.torch_device)
    back = []
    for number in reversed(range(len(copies))):
        back.append(copies[number].fetch())
        if number:
            copies[number - 1].prefetch()
    device.settle_offloads()
    return back[::-1]


def fall_back(setup: TrainingSetup) -> str:
    """Copy to the device from ordinary memory, during which the host waits; returns what the run does instead, in a few
    words."""
    setup.context.device.stop_pinning()
    return "copies to the device go through ordinary memory"
