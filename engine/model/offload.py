"""Activation offload: tensors that autograd saves for backward wait in host memory. Results are the same; a step takes
longer and needs less device memory.

Weights remain on the device. On a GPU copies run beside the computation (`engine.device.host_copies`): while one tensor
is used, the one that backward needs next is on its way. With gradient checkpointing only the layers' inputs are
offloaded; tensors saved while a layer is recomputed stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget.trace.memory_trace import SMALLEST_OFFLOADED_BYTES
from engine.device.host_copies import HostCopy
from engine.model.loaded import LoadedModel


@dataclass
class _OnHost:
    copy: HostCopy
    before: weakref.ref[_OnHost] | None
    """The tensor saved just before this one, which backward needs soon after it. None for the first."""

    def fetch(self) -> Tensor:
        """Bring the values back to the device, and start the copy of the tensor that was saved before this one."""
        found = self.copy.fetch()
        earlier = self.before() if self.before else None
        if earlier is not None:
            earlier.copy.prefetch()
        return found


class ActivationOffload:
    """Offloads activations if `on`. Run the forward pass inside `saving()`, then call backward as usual."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._device = loaded, loaded.device
        self.on = False

    def settle(self) -> None:
        """Release device memory that unfinished copies hold. Call after backward, and after a failed attempt."""
        self._device.settle_offloads()

    def saving(self) -> AbstractContextManager[object]:
        """Context inside which saved activations are copied to the host, if `on`."""
        return self._hooks() if self.on else nullcontext()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        model = self._loaded.model
        stays = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        # Several operations save the same tensor and share one copy. Copies are keyed weakly by storage object, not by
        # address, which may be reused. torch keeps a storage's Python object alive until the memory is freed.
        copies: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[tuple[object, ...], _OnHost]]
        copies = weakref.WeakKeyDictionary()
        last: weakref.ref[_OnHost] | None = None

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            nonlocal last
            if _storage(tensor) in stays or _is_weight(tensor) or not _worth_moving(tensor):
                return _without_history(tensor)
            of_storage = copies.setdefault(tensor.untyped_storage(), {})
            view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if view not in of_storage:
                of_storage[view] = moved = _OnHost(self._device.offload(tensor), last)
                last = weakref.ref(moved)
            return of_storage[view]

        def unpack(saved: Tensor | _OnHost) -> Tensor:
            return saved.fetch() if isinstance(saved, _OnHost) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.settle()


def _without_history(tensor: Tensor) -> Tensor:
    # autograd adds the history again. Kept with it, operation and tensor would refer to each other, and the memory of a
    # failed pass would never be freed.
    return tensor if tensor.grad_fn is None else tensor.detach()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one; parameters gathered from shards during forward count, too."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


def _worth_moving(tensor: Tensor) -> bool:
    """Floating-point, not small, and not expanded (its copy would be larger)."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not tensor.is_floating_point() or size_bytes < SMALLEST_OFFLOADED_BYTES or tensor.layout != torch.strided:
        return False
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
