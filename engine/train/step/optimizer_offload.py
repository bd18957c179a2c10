"""Optimizer offload: state in host memory, copied to the device and back a few parameters at a time in each step.

The optimizer itself does the arithmetic on the device, so the numbers are the same to the bit. A staging buffer is
allocated before the first weight changes; after it only the optimizer itself allocates. On a GPU the next batch's state
is copied to the device, and the last batch's back, while the optimizer updates the current one: each half of the buffer
has every other batch. Four waits make that correct; all but the last are on the device:

- A copy to the device begins when the computation has run what was queued before, which may have used the memory that
  is now the staging buffer, and when the copy to the host of the batch that lay there before has ended.
- The update of a batch begins when its state has arrived.
- Its copy to the host begins when the update has ended.
- The host waits for all copies at the end, because it reads the state, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engine.budget.predict.shapes import STAGE_BYTES
from engine.train.step.optimizer_state import changing_state

if TYPE_CHECKING:
    from engine.device.base import Device
    from engine.device.host_copies import Streams

ALIGNMENT = 512
"""Bytes to which allocators align tensors; tensors in the staging buffer are aligned alike."""


class HostState:
    """Moves an optimizer's state between device and host. While `on`, it is on the host between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device) -> None:
        self.optimizer, self.device = optimizer, device
        self.on = False
        self._stage: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether the optimizer has no state at all (plain SGD)."""
        return not any(state for state in self.optimizer.state.values())

    def move(self, *, to_host: bool) -> None:
        """torch.OutOfMemoryError: the state does not fit on the device; all of it is still on the host then."""
        if to_host == self.on:
            return
        carry = self.device.park if to_host else self.device.upload
        moved = [
            (state, key, carry(value))
            for state in self.optimizer.state.values()
            for key, value in changing_state(state)
        ]
        for state, key, value in moved:
            state[key] = value
        self.on = to_host

    def make_room(self) -> None:
        """Allocate the next step's staging buffer. Raises torch.OutOfMemoryError; nothing has changed then."""
        if self.on and self._stage is None:
            size_bytes = max((batch.end for batch in self._batches()), default=0)
            self._stage = torch.empty(size_bytes, dtype=torch.uint8, device=self.device.torch_device)

    def step(self, update: Callable[[], None]) -> None:
        """Call `update`, which steps the parameters in the optimizer's groups: once for all, or while `on` a few at a
        time, whose state is then on the device. Frees the staging buffer. Call `make_room` before."""
        try:
            if self.on:
                self._step_in_batches(update)
            else:
                update()
        finally:
            self.give_room_back()

    def give_room_back(self) -> None:
        self._stage = None

    def _step_in_batches(self, update: Callable[[], None]) -> None:
        assert self._stage is not None, "make_room was not called"
        batches = self._batches()
        with _copying(self.device.streams, self._stage) as copies:
            for number, batch in enumerate(batches):
                following = batches[number + 1] if number + 1 < len(batches) else None
                copies.bring(batch)
                if following is not None and not following.overlaps(batch):
                    copies.bring(following)
                copies.wait_for(batch)
                with _only(self.optimizer, batch.parameters), _lent(batch):
                    update()
                copies.send_back(batch)

    def _batches(self) -> list[_Batch]:
        """Batches whose state takes at most half of the staging buffer, in either half by turns; a parameter with more
        state is a batch of its own, and may take all of it."""
        needs = [
            (parameter, sum(_room(held) for _, held in changing_state(self.optimizer.state.get(parameter, {}))))
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        ]
        half_bytes = max(STAGE_BYTES, max((need for _, need in needs), default=0)) // 2
        batches: list[list[Tensor]] = []
        sizes: list[int] = []
        for parameter, need in needs:
            if not batches or sizes[-1] + need > half_bytes:
                batches.append([])
                sizes.append(0)
            batches[-1].append(parameter)
            sizes[-1] += need
        return self._placed(batches, sizes, half_bytes)

    def _placed(self, batches: list[list[Tensor]], sizes: list[int], half_bytes: int) -> list[_Batch]:
        """Place batches by turns in the first half, or behind what the largest batch of the first half takes there."""
        in_halves = [number for number, size in enumerate(sizes) if size <= half_bytes]
        first_half = {number: position % 2 == 0 for position, number in enumerate(in_halves)}
        second = max((sizes[number] for number, first in first_half.items() if first), default=0)
        placed: list[_Batch] = []
        for number, (parameters, size) in enumerate(zip(batches, sizes, strict=True)):
            start = 0 if first_half.get(number, True) else second
            states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
            placed.append(_Batch(parameters, states, start, start + size))
        return placed


class _Staged(NamedTuple):
    """One tensor of state: its dict and key in the optimizer, its host tensor and its view in the staging buffer."""

    state: dict[str, Any]
    key: str
    held: Tensor
    view: Tensor


@dataclass
class _Batch:
    """Parameters that are updated together, and the bytes [start, end) of the staging buffer that their state takes."""

    parameters: list[Tensor]
    states: list[dict[str, Any]]
    start: int
    end: int
    staged: list[_Staged] = field(default_factory=list)
    """Empty until they were copied to the device."""
    arrived: Any = None
    """Completes when the state is on the device; None until the copying was started."""

    def overlaps(self, other: _Batch) -> bool:
        return self.start < other.end and other.start < self.end


class _Copies:
    """Copies the state of batches into a staging buffer and back to the host, on the streams of a device."""

    def __init__(self, streams: Streams, stage: Tensor) -> None:
        self._streams, self._stage = streams, stage
        self._leaving: list[tuple[_Batch, Any]] = []
        """The copies to the host started last. They run one after another, so the last two are enough."""

    def bring(self, batch: _Batch) -> None:
        """Start to copy a batch's state to the device, unless that was started before."""
        if batch.arrived is not None:
            return
        offset = batch.start
        for state in batch.states:
            for key, held in changing_state(state):
                size_bytes = held.numel() * held.element_size()
                view = self._stage[offset : offset + size_bytes].view(held.dtype).view(held.shape)
                batch.staged.append(_Staged(state, key, held, view))
                offset += _room(held)
        back = self._streams.back
        back.wait_event(self._streams.compute().record_event())
        for left, done in self._leaving:
            if batch.overlaps(left):
                back.wait_event(done)
        with self._streams.on(back):
            for one in batch.staged:
                one.view.copy_(one.held, non_blocking=True)
        batch.arrived = back.record_event()

    def wait_for(self, batch: _Batch) -> None:
        """On the device: the computation waits for a batch's state."""
        self._streams.compute().wait_event(batch.arrived)

    def send_back(self, batch: _Batch) -> None:
        """Start to copy a batch's updated state to the host."""
        out = self._streams.out
        out.wait_event(self._streams.compute().record_event())
        with self._streams.on(out):
            for one in batch.staged:
                one.held.copy_(one.view, non_blocking=True)
        self._leaving = [*self._leaving[-1:], (batch, out.record_event())]

    def finish(self) -> None:
        """Wait on the host until all copies have ended."""
        self._streams.wait_on_host(self._streams.back)
        self._streams.wait_on_host(self._streams.out)


@contextmanager
def _copying(streams: Streams, stage: Tensor) -> Iterator[_Copies]:
    """The host waits for the copies at the end, also after an error, so that nothing writes to memory that is freed."""
    copies = _Copies(streams, stage)
    try:
        yield copies
    finally:
        copies.finish()


@contextmanager
def _lent(batch: _Batch) -> Iterator[None]:
    """While the block runs, the optimizer's state of a batch's parameters is the one in the staging buffer."""
    for state, key, _, view in batch.staged:
        state[key] = view
    try:
        yield
    finally:
        for state, key, held, _ in batch.staged:
            state[key] = held


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
    try:
        yield
    finally:
        for group, former in zip(groups, before, strict=True):
            group["params"] = former


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
