"""Makes the device run out of memory at a chosen place of a sharded step: in forward, while gathered weights are copied
out, in backward, and while gradients are reduced.

At the place, more is requested than the device's cap allows, so the error is the allocator's own.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.base import Device
from engine.device.determinism import unfilled_memory
from engine.train.proofs.memory import too_much


class Place(NamedTuple):
    """A place in a step: the first operation `at` once the operation `after` has run so many `times`."""

    after: str
    times: int
    at: str


PLACES = {
    "forward": Place("aten::silu", 1, "aten::silu"),
    "copy-out": Place("fsdp::split_with_sizes_copy", 2, "fsdp::split_with_sizes_copy"),
    "backward": Place("aten::silu_backward", 1, "aten::silu_backward"),
    "reduce allocation": Place("fsdp::chunk_cat", 2, "aten::empty"),
    "reduce cast": Place("c10d::_reduce_scatter_base_", 2, "aten::_to_copy"),
}
"""Places by name. At "copy-out" and "reduce cast" the other ranks have launched the same collective and go on."""


class RunsOutAt(TorchDispatchMode):
    """Context manager: inside the block, the operation at a place raises the out-of-memory error of the device."""

    def __init__(self, place: Place, device: Device) -> None:
        untyped: Any = super()
        untyped.__init__()
        self._place, self._device, self._left = place, device, place.times

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        if self._left == 0 and name == self._place.at:
            self._left = -1
            with unfilled_memory():
                torch.empty(too_much(self._device), dtype=torch.uint8, device=self._device.torch_device)
        result = operation(*args, **(kwargs or {}))
        if self._left > 0 and name == self._place.after:
            self._left -= 1
        return result
