"""A metered device whose tensors are fake: shapes, dtypes and lifetimes are real, memory is not.

Bytes are counted by the metered device's own `engine.device.allocation_tracker`, so a simulation and a metered run
follow the same rules. With `like_a_card`, two differences to a card are removed: under any dispatch mode autograd sums
gradients of the same tensor out of place, on a card in place; and softmax in fp32 casts its input first, where a card
has a kernel that reads half precision.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from engine.device.metered import MeteredDevice

ROOMY_BYTES = 1 << 60
"""A simulation is there to find the peak, not to run into a limit."""


class SimulatedDevice(MeteredDevice):
    """See the module's docstring."""

    def __init__(self, *, like_a_card: bool) -> None:
        super().__init__(ROOMY_BYTES)
        self.name = "simulated"
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._meter.tracker.counts_fake_tensors = True
        self._like_a_card = like_a_card
        self._answers = _Answers()

    @contextmanager
    def simulating(self, *, packed: bool) -> Iterator[None]:
        """Everything made inside is fake and counted."""
        kernels = _softmax_of_a_card() if self._like_a_card else nullcontext()
        with _packing_known(packed), self._mode, self.activate(), self._answers, kernels:
            yield

    @contextmanager
    def unequal_rows(self) -> Iterator[None]:
        """Inside, whether a mask is ones all over is answered with no: rows are of different lengths."""
        self._answers.truth = False
        try:
            yield
        finally:
            self._answers.truth = True

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        self._meter.tracker.sums_gradients_in_place = self._like_a_card
        try:
            yield
        finally:
            self._meter.tracker.sums_gradients_in_place = False


class _Answers(TorchDispatchMode):
    """Answers `tensor.item()` of a fake tensor with one: no size depends on what is asked of them. And multiplies in
    groups in every dtype that torch has kernels for, of which its fakes know bf16 alone.

    Sizes do depend on how images are cut into windows. This is worked out in whole numbers, which come from the grid of
    each image: real ones stay real, and so does what is made of nothing else.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.truth = True
        """Of whether something holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(value, torch.Tensor)]
        if all(_is_known(tensor) for tensor in tensors) and (tensors or func is torch.ops.aten.arange.default):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.truth if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A tensor as `torch._grouped_mm` gives it: rows are apart by whole units of 16 bytes."""
    groups = [len(offsets)] if right.dim() == 2 else []  # of both sides: the gradient of the weights
    rows, columns, unit = left.shape[-2], right.shape[-1], 16 // left.itemsize
    apart = -(-columns // unit) * unit
    return left.new_empty_strided((*groups, rows, columns), (*[rows * apart for _ in groups], apart, 1))


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether it holds real whole numbers."""
    return not isinstance(tensor, FakeTensor) and not (tensor.is_floating_point() or tensor.is_complex())


@contextmanager
def _packing_known(packed: bool) -> Iterator[None]:
    """transformers looks at position ids to see whether rows are packed; fake ones cannot be looked at."""
    former = masking_utils.find_packed_sequence_indices

    def known(position_ids: torch.Tensor) -> torch.Tensor | None:
        return former(position_ids) if packed else None

    masking_utils.find_packed_sequence_indices = known
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = former


@contextmanager
def _softmax_of_a_card() -> Iterator[None]:
    """Softmax of a half-precision tensor in fp32 as CUDA does it, forward and backward: in one pass."""
    former = functional.softmax

    def softmax(
        input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if dim is not None and dtype is torch.float32 and input.itemsize == 2:
            return torch._softmax(input, dim, True)
        return former(input, dim, _stacklevel, dtype)

    functional.softmax = softmax
    try:
        yield
    finally:
        functional.softmax = former
