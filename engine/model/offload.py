"""Activation offload: activations saved for backward are stored in host memory. Results are the same; a step takes
longer and needs less device memory.

Tensors that autograd saves are copied to the host, and back when backward needs them. Weights remain on the device.
On a GPU the copies run beside the computation (`engine.device.host_copies`): while a tensor that came back is used, the
one that backward needs next is on its way.

With gradient checkpointing, forward saves only the layers' inputs, and only these are offloaded. Tensors saved while a
layer is recomputed are used at once and remain on the device.

Try: `tunedeck train -p demo -r demo --set train.activation_offload=true`
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.host_copies import HostCopy
from engine.model.loaded import LoadedModel

SMALLEST_BYTES = 16 * 1024
"""Tensors below this size (norm statistics, masks) are not offloaded: to start their copy takes as long as the copy
itself."""


@dataclass
class _OnHost:
    """A tensor that autograd saved for backward, copied to the host."""

    copy: HostCopy
    before: weakref.ref[_OnHost] | None
    """The tensor that was saved just before this one; backward needs it soon after this one. None for the first."""

    def fetch(self) -> Tensor:
        """Return a new device tensor with the values, and start the copy back to the device of the tensor that was
        saved before this one."""
        found = self.copy.fetch()
        earlier = self.before() if self.before else None
        if earlier is not None:
            earlier.copy.prefetch()
        return found


class ActivationOffload:
    """Stores the activations that autograd saves for backward in host memory, if `on` is True. Run the forward pass
    inside `saving()`, then call backward as usual."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._device = loaded, loaded.device
        self.on = False

    def settle(self) -> None:
        """Release the device memory that unfinished copies still hold. Call this after backward, and after a failed
        attempt."""
        self._device.settle_offloads()

    def saving(self) -> AbstractContextManager[object]:
        """Return a context inside which the activations that autograd saves are copied to the host, if `on` is True."""
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
    """Return `tensor` detached from the autograd graph, so that a hook may keep it; autograd adds the history again by
    itself.

    The output of an operation refers to the operation, and the operation to the hook's tensor: only a finished backward
    pass breaks this cycle, so the memory of a failed pass would never be freed.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one; parameters gathered from shards during forward count, too."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


def _worth_moving(tensor: Tensor) -> bool:
    """Whether a tensor is worth offloading: floating-point, not small, and not expanded (its copy would be larger)."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not tensor.is_floating_point() or size_bytes < SMALLEST_BYTES or tensor.layout != torch.strided:
        return False
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
