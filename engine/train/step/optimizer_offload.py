"""Optimizer state in host memory, moved to the device and back a few parameters at a time in each step.

The optimizer itself does the arithmetic, on the device, tensor by tensor as it always does; so the numbers are the same
to the bit. Room for the largest batch of state is taken before the first weight changes: from then on nothing more is
allocated than the optimizer itself allocates.

Try: `tunedeck train -p demo -r demo --set train.optimizer_offload=true`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.budget.predict.static import STAGE_BYTES
from engine.device.base import Device
from engine.train.step.optimizer_state import changing_state

ALIGNMENT = 512
"""Bytes to which allocators align tensors; tensors in the staging buffer are aligned alike."""


class HostState:
    """Moves an optimizer's state between device and host. While `on` is true, the state is on the host between
    steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device) -> None:
        self.optimizer, self.device = optimizer, device
        self.on = False
        self._stage: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether the optimizer has no state at all (plain SGD)."""
        return not any(state for state in self.optimizer.state.values())

    def move(self, *, to_host: bool) -> None:
        """Move all state to the host, or back to the device. Raises torch.OutOfMemoryError if it does not fit on the
        device; all state is still on the host then."""
        if to_host == self.on:
            return
        carry = self.device.download if to_host else self.device.upload
        moved = [
            (state, key, carry(value))
            for state in self.optimizer.state.values()
            for key, value in changing_state(state)
        ]
        for state, key, value in moved:
            state[key] = value
        self.on = to_host

    def make_room(self) -> None:
        """Allocate the staging buffer that the next step needs. Raises torch.OutOfMemoryError; nothing has changed
        then."""
        if self.on and self._stage is None:
            most = max((sum(map(_room, self._tensors(batch))) for batch in self._batches()), default=0)
            self._stage = torch.empty(most, dtype=torch.uint8, device=self.device.torch_device)

    def step(self, update: Callable[[], None]) -> None:
        """Take an optimizer step by calling `update`, which steps the parameters in the optimizer's groups: once for
        all of them, or while `on` is true a few parameters at a time, whose state is then on the device. Frees the
        staging buffer at the end. Call `make_room` before."""
        try:
            if not self.on:
                update()
                return
            for batch in self._batches():
                with self._on_device(batch), self._only(batch):
                    update()
        finally:
            self.give_room_back()

    def give_room_back(self) -> None:
        """Free the staging buffer of a step that is over or will not be taken."""
        self._stage = None

    @contextmanager
    def _on_device(self, batch: Sequence[Tensor]) -> Iterator[None]:
        """While the block runs, the batch's state is in the staging buffer; it is copied back to the host if the block
        raises nothing."""
        assert self._stage is not None
        staged: list[tuple[dict[str, Tensor], str, Tensor, Tensor]] = []
        offset = 0
        for state in (self.optimizer.state.get(parameter, {}) for parameter in batch):
            for key, held in changing_state(state):
                size_bytes = held.numel() * held.element_size()
                view = self._stage[offset : offset + size_bytes].view(held.dtype).view(held.shape)
                view.copy_(held)
                staged.append((state, key, held, view))
                offset += _room(held)
        for state, key, _, view in staged:
            state[key] = view
        try:
            yield
            for _, _, held, view in staged:
                held.copy_(view)
        finally:
            for state, key, held, _ in staged:
                state[key] = held

    @contextmanager
    def _only(self, batch: Sequence[Tensor]) -> Iterator[None]:
        """While the block runs, the optimizer steps only the parameters in `batch`."""
        wanted = {id(parameter) for parameter in batch}
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _batches(self) -> list[list[Tensor]]:
        """Split the parameters into batches whose state takes at most STAGE_BYTES; a parameter with more state is a
        batch of its own."""
        batches: list[list[Tensor]] = []
        room = 0
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            need = sum(_room(tensor) for tensor in self._tensors([parameter]))
            if not batches or need > room:
                batches.append([])
                room = STAGE_BYTES
            batches[-1].append(parameter)
            room -= need
        return batches

    def _tensors(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            yield from (tensor for _, tensor in changing_state(self.optimizer.state.get(parameter, {})))


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
