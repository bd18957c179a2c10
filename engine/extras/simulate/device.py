"""A metered device whose tensors are fake: shapes, dtypes and lifetimes are real, memory is not.

Bytes are counted by `engine.device.allocation_tracker`, as on the metered device, so that simulations and metered runs
follow the same rules. With `like_a_card`, two differences from a CUDA card are corrected. Autograd accumulates several
gradients of a tensor in place on a card, but out of place under a dispatch mode. And softmax with an fp32 result reads
half precision directly on a card, but casts its input first elsewhere. With `like_cuda`, the backward pass of
attention takes the scratch of CUDA's kernels, and offloaded activations come back ahead of their use.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from engine.budget.trace.attention import scratch_per_token
from engine.budget.trace.operations import HALF
from engine.config.schema.run import Device as DeviceTable
from engine.device.host_copies import CopyStreams, HostCopy, NoStreams
from engine.device.metered import MeteredDevice
from engine.extras.simulate.fake_tensors import Assumed, FastFakeMode, everywhere, settled
from engine.model.dropout_kernel import drop_into, using
from engine.model.dropout_key import RowKey

UNLIMITED_BYTES = 1 << 60
"""A capacity that is never reached: a simulation measures the peak, and must not refuse an allocation."""

INDEXING = (
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index.Tensor, torch.ops.aten._index_put_impl_.default,
)  # fmt: skip
MAKING = (torch.ops.aten.full.default, torch.ops.aten.zeros.default, torch.ops.aten.ones.default)
COUNTING = (torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)

DEVICE = torch.ops.prim.device.default
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class SimulatedDevice(MeteredDevice):
    """A metered device that counts the bytes of fake tensors. With `like_a_card`, it counts them as a CUDA card would;
    with `like_cuda`, it also counts what CUDA's kernels need to compute gradients of attention, and the device memory
    of copies under way between host and card."""

    def __init__(self, *, like_a_card: bool, like_cuda: bool = False) -> None:
        super().__init__(UNLIMITED_BYTES)
        self.name = "simulated"
        self._mode = FastFakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._meter.tracker.counts_fake_tensors = True
        self._like_a_card = like_a_card
        self._operations = _Operations(like_cuda, self.host_region)
        self._copies = CopyStreams(NoStreams(), self.torch_device) if like_cuda else None

    @classmethod
    def of(cls, device: DeviceTable) -> SimulatedDevice:
        """Return a simulated device that counts bytes as the device in a profile's [device] table does."""
        return cls(like_a_card=device.kind != "metered", like_cuda=device.kind == "cuda")

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Copy `tensor` to simulated host memory and return the copy. With `like_cuda`, its device memory stays counted
        until the next tensor is copied, and the copy back is counted one tensor ahead of its use."""
        if self._copies is None:
            return super().offload(tensor)
        with self.host_region():
            host = torch.empty_like(tensor)
        return self._copies.send(tensor, host)

    def settle_offloads(self) -> None:
        """Stop counting the device memory of copies between host and card that have not finished."""
        if self._copies is not None:
            self._copies.settle()

    @contextmanager
    def simulating(self, *, packed: bool) -> Iterator[None]:
        """Make tensors created inside the block fake, and count them. `packed` says whether rows contain several
        documents."""
        kernels = _cuda_softmax() if self._like_a_card else nullcontext()
        with _assume_packed(packed), self._mode, self.activate(), self._operations, kernels:
            yield

    def read_images(self) -> None:
        """Compute from now on what depends on token ids and pixels alone. Call it when the model is there."""
        self._operations.with_images = True

    def take_log(self) -> list[int]:
        """Return the log since the last call and start a new one. A log has the allocated bytes when it was started,
        then the bytes of each allocation and (negative) of each release."""
        tracker = self._meter.tracker
        log, tracker.log = tracker.log or [tracker.allocated_bytes], [tracker.allocated_bytes]
        return log

    def settle(self, assumed: Assumed | None, experts: int) -> None:
        """Assume from now on what sizes that depend on values are (`engine.extras.simulate.fake_tensors`)."""
        self._operations.assumed, self._operations.experts = assumed, experts

    @contextmanager
    def unequal_rows(self) -> Iterator[None]:
        """Inside the block, the test that transformers makes of an attention mask, `mask.all()`, is False, so that rows
        are treated as having different lengths. Fake masks have no values."""
        self._operations.truth = False
        try:
            yield
        finally:
            self._operations.truth = True

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass inside this block: with `like_a_card`, gradients are counted as summed in place."""
        self._meter.tracker.sums_gradients_in_place = self._like_a_card
        try:
            yield
        finally:
            self._meter.tracker.sums_gradients_in_place = False


class _Operations(TorchDispatchMode):
    """A dispatch mode that implements operations which torch's fake tensors do not support, and with
    `like_cuda` takes the scratch of CUDA's kernels for the backward pass of attention.

    `item()` of a fake number returns 1; no tensor size depends on this value. Grouped matrix products also work in
    dtypes other than bf16. Operations on real (not fake) integer tensors are computed: tensor sizes depend on the
    windows into which images are divided, and the windows are computed from the integer grid of each image. With
    images, new integer tensors are real, and so is what is computed of pixels alone: a model looks for the places of
    images, and for images that are padding. So routers send tokens where `engine.extras.simulate.fake_tensors` assumes.
    """

    def __init__(self, like_cuda: bool, uncounted: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._like_cuda, self._uncounted = like_cuda, uncounted
        self.with_images = False
        self.assumed: Assumed | None = None
        self.experts = 0
        self.truth = True
        """What `item()` of a fake boolean tensor returns."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in FastFakeMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls: every `tensor.device`
        kwargs = kwargs or {}
        tensors = [value for value in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(value, torch.Tensor)]
        if all(map(self._is_real, tensors)) and (tensors or self._makes_integers(func, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1]):
            with self._uncounted():
                args = (args[0], [place for each in args[1] for place in self._places(each)], *args[2:])
            return func(*args, **kwargs)
        if self.assumed == "routing" and (result := settled(func, args, kwargs, self.experts)) is not None:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.truth if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        if self._like_cuda and func is ATTENTION_BACKWARD:
            scratch = _attention_scratch(query=args[1], key=args[2])
            result = func(*args, **kwargs)
            del scratch  # held until the gradients exist
            return result
        return func(*args, **kwargs)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Replace a mask, among the indices of a tensor, by the places that it selects, if these are known."""
        if index is None or index.dtype != torch.bool:
            return [index]
        if isinstance(index, FakeTensor):
            return list(everywhere(index)) if self.assumed else [index]
        with unset_fake_temporarily():
            return list(index.nonzero(as_tuple=True))

    def _makes_integers(self, func: Any, options: dict[str, Any]) -> bool:
        """Whether an operation without tensors among its inputs makes a real one."""
        whole = options.get("dtype") in (torch.int64, torch.int32)
        with_values = self.with_images or self.assumed == "routing"
        return func is torch.ops.aten.arange.default or (
            with_values and (func in COUNTING or (whole and func in MAKING))
        )

    def _is_real(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are computed."""
        return _is_real_integer(tensor) or (self.with_images and not isinstance(tensor, FakeTensor))


def _attention_scratch(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Allocate the scratch with which CUDA's kernels compute the gradients of attention in half precision; None for
    fp32, which needs none. `query` and `key` are [B, heads, S, head size]. Lengths are not rounded up to whole blocks.
    """
    rows, heads, length, head_dim = query.shape
    if query.itemsize != HALF:
        return None
    per_token = scratch_per_token(heads, key.shape[1], head_dim)
    return query.new_empty(rows * length * per_token, dtype=torch.uint8)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Create an empty tensor with the shape and strides of the result of `torch._grouped_mm`, in which rows are padded
    to a multiple of 16 bytes."""
    groups = [len(offsets)] if right.dim() == 2 else []  # a product of two matrices: the gradient of the weights
    rows, columns, unit = left.shape[-2], right.shape[-1], 16 // left.itemsize
    stride = -(-columns // unit) * unit
    return left.new_empty_strided((*groups, rows, columns), (*[rows * stride for _ in groups], stride, 1))


def _is_real_integer(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not fake and has an integer or boolean dtype."""
    return not isinstance(tensor, FakeTensor) and not (tensor.is_floating_point() or tensor.is_complex())


@contextmanager
def _assume_packed(packed: bool) -> Iterator[None]:
    """Inside the block, transformers looks for packed documents only if `packed` is True. Normally
    transformers inspects the values of position ids, but fake tensors have no values."""
    former = masking_utils.find_packed_sequence_indices

    def assumed(position_ids: torch.Tensor) -> torch.Tensor | None:
        return former(position_ids) if packed else None

    masking_utils.find_packed_sequence_indices = assumed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = former


@contextmanager
def _cuda_softmax() -> Iterator[None]:
    """Inside the block, fp32 softmax of a half-precision tensor is one operation, forward and backward, as on CUDA."""
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


@contextmanager
def simulated_dropout(device_kind: str) -> Iterator[None]:
    """Context manager: inside the block, dropout allocates what it allocates on a device of this kind ("cuda",
    "metered", "cpu")."""
    with using(_output if device_kind == "cuda" else _two_rows, "cpu"):
        yield


def _output(rows_RSF: Tensor, *_: object) -> Tensor:
    """On CUDA one kernel computes dropout, and allocates nothing but its output."""
    return torch.empty_like(rows_RSF)


def _two_rows(rows_RSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """The reference needs the memory of two masks at most, the one it computes and the one before it: further rows
    repeat the same allocations. Of the eight rows of attention with two samples and four heads, six are left out."""
    result_RSF = torch.empty_like(rows_RSF)
    drop_into(result_RSF[:2], rows_RSF[:2], keys[:2], first, probability)
    return result_RSF
