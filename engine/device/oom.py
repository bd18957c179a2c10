"""Recognises out-of-memory errors in every form that torch and its libraries raise, and errors that end the process.

This file contains patterns of messages, which quote the sources named beside them; `tests/device/test_oom.py` contains
whole messages from real runs. What to do about an OOM is decided in `engine.train`.

Try: `python -c "from engine.device.oom import classify; print(classify(MemoryError()))"`.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.errors import TunedeckError

MemoryKind = Literal["device", "host", "pinned"]
"""Which memory ran out: the device's, the host's, or page-locked host memory."""

_PINNED = (
    r"cudaHostAlloc",
    r"cudaHostRegister",
    r"CachingHostAllocator",
    r"pin.memory[\s\S]*out of memory",  # re-raised from the DataLoader's pin thread with its traceback in the text
    r"(could not|cannot|can't|unable to|failed to) (pin|allocate pinned|allocate page-locked)",
)
_DEVICE = (
    r"CUDA out of memory",  # c10/cuda/CUDACachingAllocator.cpp; torch < 2.5 raised it as a RuntimeError in places
    r"CUDA (driver )?error:? ?:?(\(\d+\))?\s*out of memory",  # cudaErrorMemoryAllocation, with or without the code
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",  # driver API: Triton, bitsandbytes, NVRTC
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",  # cuDNN 9's finer codes
    r"Cuda failure (\d+ )?'?out of memory|Failed to CUDA \w*alloc",  # NCCL's last error, quoted by ProcessGroupNCCL
    r"Triton Error \[CUDA\]: out of memory",
    r"HIP out of memory",
    r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",  # while it words an out-of-memory message
)
_HOST = (
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",  # c10/core/impl/alloc_cpu.cpp
    r"could not create a (primitive|memory object|memory)\b",  # oneDNN, which reports a failed workspace this way
    r"Cannot allocate memory|\[Errno 12\]",
    r"unable to mmap \d+ bytes from file",
    r"unable to allocate shared memory|No space left on device.*(shm|torch_)",  # DataLoader workers and /dev/shm
    r"std::bad_alloc",
    r"can't start new thread",  # Python: no memory for another stack, or no more threads allowed
)
# cuBLAS and cuDNN say "not initialized" of a handle they had no memory for, but also for other causes: checked last.
_MAYBE_DEVICE = (r"CUBLAS_STATUS_NOT_INITIALIZED", r"CUDNN_STATUS_NOT_INITIALIZED")
_STICKY = (
    r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress",
    r"device-side assert",
    r"unspecified launch failure",
    r"misaligned address|illegal instruction|invalid program counter|hardware stack error",
    r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_ECC_UNCORRECTABLE",
    r"the launch timed out",
    r"(GPU|device) (has fallen off the bus|is lost)|cudaErrorDevicesUnavailable|GPU is lost",
    r"NCCL communicator was aborted|watchdog .*caught collective operation timeout|ncclRemoteError",
    r"CUDA context (is|was) (destroyed|invalid)|cudaErrorContextIsDestroyed",
    # Memory that ran out at the driver's own limit can leave a torn expandable segment, on which every later request of
    # the process fails (pytorch issue 188008). The assertion about NVML is an out-of-memory error, see _DEVICE.
    r"(?<!NVML_SUCCESS == r )INTERNAL ASSERT FAILED at \S*CUDACachingAllocator\.cpp",
)


def _any(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


_PINNED_RE, _DEVICE_RE, _HOST_RE = _any(_PINNED), _any(_DEVICE), _any(_HOST)
_MAYBE_DEVICE_RE, _STICKY_RE = _any(_MAYBE_DEVICE), _any(_STICKY)
_REQUEST_RE = re.compile(
    r"(?:tried|trying|try|unable) to allocate\s+([\d.]+)\s*(bytes|[KMGT]i?B)?"
    r"|you tried to allocate (\d+) bytes"
    r"|failed to CUDA \w*alloc(?: async)? (\d+) bytes",
    re.IGNORECASE,
)
REQUESTED_BYTES = "requested_bytes"
"""Name of the attribute in which an error of the metered device stores the exact size of the refused request. The text
of the error contains only a rounded size."""

_UNIT_BYTES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class StuckDeviceError(TunedeckError):
    """Work that was queued on the device has not ended within the time limit."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The contents of device memory at one moment: bytes by component, the largest live tensors, and on CUDA the
    allocator's own snapshot."""

    components: dict[str, int]
    largest: list[dict[str, Any]]
    snapshot: Any


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One allocation failure. `classify` sets the first three fields from the exception; `catch_oom` sets the others
    from the state of the device when the allocation failed."""

    kind: MemoryKind
    """Which memory ran out. On the plain CPU, whose device memory is host memory, `catch_oom` always sets "device"."""
    requested_bytes: int | None
    """Size of the failed request; None if the error message does not state a size."""
    text: str
    phase: str = ""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    held: MemoryBreakdown | None = None
    """The contents of device memory at the failure; None if not recorded."""


def classify(error: BaseException) -> OutOfMemory | None:
    """Return the allocation failure that `error` reports, or None for any other error. The `__cause__` and
    `__context__` of `error` are not examined.

    A kernel that needs more shared memory than an SM has (Triton's OutOfResources) is not an allocation failure,
    because a smaller batch does not help. Nor is a sticky error (see `is_sticky`), even if its text mentions memory.
    """
    text = str(error)
    if is_sticky(error):
        return None
    kind = _kind(error, text)
    return OutOfMemory(kind, _requested_bytes(error, text), text) if kind else None


def _kind(error: BaseException, text: str) -> MemoryKind | None:
    # A MemoryError is Python's own; RuntimeError covers torch.OutOfMemoryError, AcceleratorError and DistBackendError.
    if isinstance(error, MemoryError):
        return "host"
    if not isinstance(error, (RuntimeError, OSError)):
        return None
    if _PINNED_RE.search(text):
        return "pinned"
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_RE.search(text):
        return "device"
    if _HOST_RE.search(text):
        return "host"
    return "device" if _MAYBE_DEVICE_RE.search(text) else None


def _requested_bytes(error: BaseException, text: str) -> int | None:
    exact = getattr(error, REQUESTED_BYTES, None)
    if isinstance(exact, int):
        return exact
    found = _REQUEST_RE.search(text)
    if not found:
        return None
    number, unit, *whole = found.groups()
    if number is None:
        return int(next(value for value in whole if value))
    return int(float(number.rstrip(".")) * _UNIT_BYTES[(unit or "b")[0].lower()])


def is_sticky(error: BaseException) -> bool:
    """Whether `error` leaves the CUDA context or a communicator unusable, so that nothing can be retried in this
    process."""
    return isinstance(error, RuntimeError) and _STICKY_RE.search(str(error)) is not None


def beyond_repair(error: BaseException) -> bool:
    """Whether only a new process can use the device after `error`: it is a sticky error (see `is_sticky`), another
    error of the CUDA driver, or queued work that does not end."""
    return isinstance(error, (torch.AcceleratorError, StuckDeviceError)) or is_sticky(error)


def flush_autograd() -> None:
    """Run a one-element backward pass, so that the autograd engine frees the graph of a failed backward pass.

    After an exception inside backward, the engine's queue holds the failed graph with all its saved activations until
    the thread's next backward pass. Call this function outside the `except` block. It allocates its few bytes outside
    every dispatch mode, so a full metered device cannot refuse them.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True).add(0))


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of every frame in the tracebacks of `error` and of the errors it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
