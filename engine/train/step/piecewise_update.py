"""Takes the optimizer's step in fp32 for weights stored in bf16, a piece at a time, with exact or stochastic rounding.

A bf16 number is the upper half of an fp32 number, so an update below 2^-9 of a weight is lost in rounding to bf16. No
update may fail in the middle: after `make_room`, called before the first weight changes, only an optimizer that
allocates itself can run out of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from engine.budget.predict.shapes import PIECE_ELEMENTS
from engine.model.dropout_key import row_key
from engine.train.step.optimizer_state import CONSTANTS, REMAINDER, counts_in_ints

if TYPE_CHECKING:
    from engine.train.step.optimizer_state import Rounding

HALF = 0x8000
"""Half of a unit in the last place of bf16, in the bits of fp32."""
LOWER = 0xFFFF
"""The bits of fp32 that bf16 does not have."""
INDEX_LIMIT = 2**31
"""Elements are numbered in int32; tensors are cut at its multiples, which enter the key."""


def split_(bits: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split `bits` (overwritten) into bf16 `weight` and int16 `remainder`: bits = weight bits · 2^16 + remainder.
    Rounded half up in magnitude, not half to even: then the lower half, as a signed integer, is always the
    difference."""
    remainder.copy_(bits)  # to a narrower integer: the lower half
    bits.add_(HALF).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def join_(weight: Tensor, remainder: Tensor, bits: Tensor) -> None:
    """The inverse of `split_`: write `bits`."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    bits.add_(remainder)


def noise_(bits: Tensor, spare: Tensor, *, seed: int, step: int, name: str, first: int) -> None:
    """Fill int32[N] `bits` with independent uniform integers from 0 to 2^16 - 1; `spare`, int32[N], is overwritten.
    They are the same on any number of ranks and after a retry.

    Each is murmur3's 32-bit finaliser (Appleby 2011, public domain) of the element's number, keyed with 64 bits of a
    BLAKE2 hash of seed, step and `name`: half are added before it, half combined with the result by XOR. `first` is the
    number of the first element in the whole tensor `name`; no multiple of INDEX_LIMIT may lie between first and last.
    """
    block, first = divmod(first, INDEX_LIMIT)
    before, after = row_key(seed, step, block, name)
    torch.arange(first, first + len(bits), out=bits)
    bits.mul_(-1640531527).add_(before)
    for shift, mask, factor in ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387), (16, 0xFFFF, 1)):
        # The mask makes the arithmetic shift a logical one.
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_(mask)).mul_(factor)
    bits.bitwise_xor_(after).bitwise_and_(LOWER)


def round_stochastically_(bits: Tensor, noise: Tensor, result: Tensor) -> None:
    """Round `bits` (overwritten) at random, without bias, to bf16 `result`; `noise`: int32, uniform from 0 to 2^16 - 1.
    Numbers that bf16 can represent are unchanged. The probability to round up is the fraction cut off (Gupta et al.
    2015, "Deep Learning with Limited Numerical Precision", section 3)."""
    bits.add_(noise).bitwise_right_shift_(16)
    result.view(torch.int16).copy_(bits)


SLOT_ELEMENTS = 128
"""fp32 numbers in 512 bytes, to which allocators align tensors; tensors in the scratch are aligned alike."""
CUT_ELEMENTS = 512
"""Tensors are cut at its multiples, so that no block that an 8-bit optimizer quantises together is cut in two."""
BLOCK_ELEMENTS = 256
"""Numbers that bitsandbytes quantises together (Optimizer2State.init_state)."""
SCALES = ("absmax1", "absmax2")
"""State of bitsandbytes that has one number for each block."""


@dataclass(frozen=True)
class _Segment:
    """Elements [start, end) of one parameter, with their place in the scratch."""

    parameter: Parameter
    group: int
    start: int
    end: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.start : self.end]


class PiecewiseUpdate:
    """Steps an optimizer over weights of any dtype; those in bf16 piece by piece in fp32. State in bf16 is rounded
    stochastically: to nearest, a second moment could not decay at beta2 = 0.999, because 0.1 % is less than half a unit
    in the last place. Rounding "nearest" with bf16 state, and weights in fp32 and fp16, are left to torch's own
    optimizer without scratch. Adafactor needs norms of whole matrices: one tensor at a time."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, Parameter]],
        rounding: Rounding,
        first_elements: Mapping[str, int] | None = None,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        """`first_elements`: of sharded weights, by name, where in the flat whole parameter this rank's part begins."""
        self.optimizer, self.rounding = optimizer, rounding
        self._keys = {id(parameter): (name, (first_elements or {}).get(name, 0)) for name, parameter in named}
        self._whole = isinstance(optimizer, torch.optim.Adafactor)
        self._counts_in_ints = counts_in_ints(optimizer)
        slots = [_slot(p.numel()) for _, p in named if rounding.needs_scratch(p)]
        self._capacity = max(slots, default=0) if self._whole else min(piece_elements, sum(slots))
        self._scratch: Tensor | None = None

    @property
    def allocation_free(self) -> bool:
        """Whether a step allocates nothing after `make_room`."""
        fused = isinstance(self.optimizer, (torch.optim.AdamW, torch.optim.SGD))
        return fused and bool(self.optimizer.defaults.get("fused"))

    def make_room(self) -> None:
        """Allocate the next step's scratch. Raises torch.OutOfMemoryError; nothing has changed then."""
        if self._capacity and self._scratch is None:
            device = self.optimizer.param_groups[0]["params"][0].device
            elements = self._rows * self._capacity + SLOT_ELEMENTS
            self._scratch = torch.empty(elements, dtype=torch.float32, device=device)

    def give_room_back(self) -> None:
        self._scratch = None

    def step(self, number: int) -> None:
        """Step the parameters in the optimizer's groups. Call `make_room` before."""
        groups = self.optimizer.param_groups
        given = [[parameter for parameter in group["params"] if parameter.grad is not None] for group in groups]
        direct = [[p for p in parameters if not self.rounding.needs_scratch(p)] for parameters in given]
        for parameters in self._together(direct):
            with self._only(parameters), self._int_counters(chain(*parameters)):
                self.optimizer.step()
        scratched = [[p for p in parameters if self.rounding.needs_scratch(p)] for parameters in given]
        for piece in self._pieces(scratched):
            self._step_piece(piece, number)

    def _together(self, direct: list[list[Parameter]]) -> Iterator[list[list[Parameter]]]:
        """What one call of the optimizer updates, by group: all parameters; for adafactor each alone, as torch's loop
        holds the update of the one before while it computes the next."""
        if not self._whole:
            yield from [direct] if any(direct) else []
            return
        for number, parameters in enumerate(direct):
            for parameter in parameters:
                yield [[parameter] if number == other else [] for other in range(len(direct))]

    @property
    def _rows(self) -> int:
        """Weight, gradient, one to compute random bits, and one for each kind of state widened to fp32."""
        return 2 + self._draws + len(self._widened)

    @property
    def _draws(self) -> bool:
        """Whether random bits are drawn, for stochastic rounding of weights or state."""
        return self.rounding.mode == "stochastic" or bool(self._widened)

    @property
    def _widened(self) -> tuple[str, ...]:
        """Names of the state that is stored in bf16 and widened to fp32 in the scratch."""
        if self.rounding.state_dtype != torch.bfloat16:
            return ()
        if isinstance(self.optimizer, torch.optim.AdamW):
            return ("exp_avg", "exp_avg_sq")
        with_momentum = any(group.get("momentum") for group in self.optimizer.param_groups)
        return ("momentum_buffer",) if with_momentum else ()

    def _pieces(self, by_group: Sequence[Sequence[Parameter]]) -> Iterator[list[_Segment]]:
        """Pack parameters in order into pieces of the scratch's capacity. A piece ends where a parameter is cut, so
        only its first segment can continue a parameter of the piece before. For adafactor each parameter is a piece."""
        piece: list[_Segment] = []
        offset = 0
        for group, parameter in ((group, p) for group, parameters in enumerate(by_group) for p in parameters):
            start = 0
            while start < parameter.numel():
                size = self._fitting(parameter, start, self._capacity - offset)
                if size:
                    piece.append(_Segment(parameter, group, start, start + size, offset))
                    offset += _slot(size)
                    start += size
                if self._whole or start < parameter.numel():
                    yield piece
                    piece, offset = [], 0
        if piece:
            yield piece

    def _fitting(self, parameter: Parameter, start: int, room: int) -> int:
        """How many elements of a parameter, from `start` on, fit into `room` elements of scratch."""
        rest = parameter.numel() - start
        if self._whole:
            return rest
        first = self._keys[id(parameter)][1] + start
        rest = min(rest, INDEX_LIMIT - first % INDEX_LIMIT)
        return rest if _slot(rest) <= room else room // CUT_ELEMENTS * CUT_ELEMENTS

    def _step_piece(self, piece: Sequence[_Segment], number: int) -> None:
        shadows = {segment: self._shadow(segment) for segment in piece}
        states = {segment: self._lend_state(segment, shadow) for segment, shadow in shadows.items()}
        groups: list[list[Parameter]] = [[] for _ in self.optimizer.param_groups]
        for segment, shadow in shadows.items():
            groups[segment.group].append(shadow)
        try:
            with self._only(groups):
                self.optimizer.step()
        finally:
            for shadow in shadows.values():
                self.optimizer.state.pop(shadow, None)
        for segment in piece:
            self._write_back(segment, states[segment], number)

    def _row(self, row: int, segment: _Segment) -> Tensor:
        assert self._scratch is not None, "make_room was not called"
        start = row * self._capacity + segment.offset
        return self._scratch[start : start + segment.size]

    def _bits(self, row: int, segment: _Segment) -> Tensor:
        return self._row(row, segment).view(torch.int32)

    def _shadow(self, segment: _Segment) -> Parameter:
        """A parameter for the optimizer that holds the segment's weight and gradient in fp32, in the scratch."""
        parameter, shape = segment.parameter, segment.parameter.shape if self._whole else (segment.size,)
        assert parameter.grad is not None
        if self.rounding.mode == "exact":
            join_(
                segment.of(parameter.data),
                segment.of(self.optimizer.state[parameter][REMAINDER]),
                self._bits(0, segment),
            )
        else:
            self._row(0, segment).copy_(segment.of(parameter.data))
        self._row(1, segment).copy_(segment.of(parameter.grad))
        shadow = Parameter(self._row(0, segment).view(shape), requires_grad=False)
        shadow.grad = self._row(1, segment).view(shape)
        return shadow

    def _lend_state(self, segment: _Segment, shadow: Parameter) -> dict[str, Any]:
        """Make the segment's state, widened to fp32 if bf16, that of `shadow`; returns it by name."""
        state = self.optimizer.state[segment.parameter]
        lent = {key: self._part(key, value, segment) for key, value in state.items() if key != REMAINDER}
        for row, key in enumerate(self._widened):
            wide = self._row(3 + row, segment)
            wide.copy_(lent[key])
            lent[key] = wide
        if "step" in state:
            lent["step"] = self._counter(state["step"], first=segment.start == 0)
        self.optimizer.state[shadow] = lent
        return lent

    def _part(self, key: str, value: Any, segment: _Segment) -> Any:
        if self._whole or key in CONSTANTS or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if key in SCALES:
            return value[segment.start // BLOCK_ELEMENTS : -(-segment.end // BLOCK_ELEMENTS)]
        return segment.of(value)

    def _counter(self, counter: Tensor, *, first: bool) -> Any:
        """Only a parameter's `first` segment advances its own counter, the others a copy from before the step."""
        if self._counts_in_ints:
            before = int(counter) - (not first)
            if first:
                counter.add_(1)
            return before
        assert self._scratch is not None
        return counter if first else self._scratch[-1].copy_(counter).sub_(1)

    def _write_back(self, segment: _Segment, lent: Mapping[str, Any], number: int) -> None:
        """Round the segment's updated weight and widened state from the scratch into the bf16 tensors."""
        parameter = segment.parameter
        weight, bits = segment.of(parameter.data), self._bits(0, segment)
        if self.rounding.mode == "exact":
            split_(bits, weight, segment.of(self.optimizer.state[parameter][REMAINDER]))
        elif self.rounding.mode == "nearest":
            weight.copy_(self._row(0, segment))
        else:
            round_stochastically_(bits, self._noise(segment, "", number), weight)
        for key in self._widened:
            stored = segment.of(self.optimizer.state[parameter][key])
            round_stochastically_(lent[key].view(torch.int32), self._noise(segment, key, number), stored)

    def _noise(self, segment: _Segment, state: str, number: int) -> Tensor:
        """Random int32 bits for one kind of state (empty: the weight), in the gradient's row, no longer needed."""
        name, first = self._keys[id(segment.parameter)]
        bits, spare = self._bits(1, segment), self._bits(2, segment)
        key = f"{name}::{state}" if state else name
        noise_(bits, spare, seed=self.rounding.seed, step=number, name=key, first=first + segment.start)
        return bits

    @contextmanager
    def _only(self, parameters: Sequence[Sequence[Parameter]]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, chosen in zip(groups, parameters, strict=True):
            group["params"] = chosen
        try:
            yield
        finally:
            for group, former in zip(groups, before, strict=True):
                group["params"] = former

    @contextmanager
    def _int_counters(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """While the block runs, step counters are Python integers if the optimizer needs that."""
        states = [self.optimizer.state[parameter] for parameter in parameters if self._counts_in_ints]
        counters = [state["step"] for state in states]
        for state in states:
            state["step"] = int(state["step"])
        try:
            yield
        finally:
            for state, counter in zip(states, counters, strict=True):
                state["step"] = counter.fill_(state["step"])


def _slot(elements: int) -> int:
    """Rounded up to whole slots."""
    return -(-elements // SLOT_ELEMENTS) * SLOT_ELEMENTS
