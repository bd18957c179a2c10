"""Page-locks host memory in place, so that the GPU copies to and from it while the host goes on.

torch's own allocator of page-locked memory rounds every tensor up to a power of two, by up to its own size again. That
suits batches, which come and go, but not gigabytes of optimizer state. Here whole pages are allocated as ordinary
memory and then registered with the driver (`cudaHostRegister`, CUDA Runtime API).

Try: `pytest tests/device/test_page_lock.py`
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any, Protocol

import torch


class Registrar(Protocol):
    """The two functions of `torch.cuda.cudart()` that are used here. Each returns a CUDA error code, 0 for success."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> Any:  # CUDA writes it so
        """Page-lock `size_bytes` bytes at `address`."""
        ...

    def cudaHostUnregister(self, address: int, /) -> Any:  # CUDA writes it so
        """Unlock the memory at `address`, which was registered before."""
        ...


def page_locked_copy(tensor: torch.Tensor, registrar: Registrar) -> tuple[torch.Tensor, int]:
    """Copy `tensor` to host memory of whole pages and page-lock them until the copy is freed; the copy is complete on
    return. Returns the copy and CUDA's error code: 0, or the reason why the copy is ordinary memory."""
    used_bytes = tensor.numel() * tensor.element_size()
    size_bytes = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8)
    first = -pages.data_ptr() % mmap.PAGESIZE
    copy = pages[first : first + used_bytes].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor.detach())
    if not used_bytes:
        return copy, 0
    code = int(registrar.cudaHostRegister(copy.data_ptr(), size_bytes, 0))
    if code == 0:
        # Of the storage, not of the tensor: views of the copy share the storage and may live longer.
        released = weakref.finalize(copy.untyped_storage(), registrar.cudaHostUnregister, copy.data_ptr())
        released.atexit = False  # CUDA may be shut down by then, and the process ends anyway
    return copy, code
