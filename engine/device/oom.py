"""Out-of-memory errors: recognised in every form that torch and its libraries raise, and caught without keeping any
tensor of the failed attempt alive."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.device.base import Device
from engine.errors import MemoryExhaustedError, TunedeckError

MemoryKind = Literal["device", "host", "pinned"]

# Quoted from the sources named beside them; tests/device/test_oom.py has whole messages of real runs.
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
_LOST = (
    r"uncorrectable (ECC|NVLink) error|CUDA_ERROR_ECC_UNCORRECTABLE",
    r"(GPU|device) (has fallen off the bus|is lost)|cudaErrorDevicesUnavailable|GPU is lost",
)
_STICKY = (
    r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress",
    r"device-side assert",
    r"unspecified launch failure",
    r"misaligned address|illegal instruction|invalid program counter|hardware stack error",
    r"the launch timed out",
    *_LOST,
    r"NCCL communicator was aborted|watchdog .*caught collective operation timeout|ncclRemoteError",
    r"CUDA context (is|was) (destroyed|invalid)|cudaErrorContextIsDestroyed",
    # Memory that ran out at the driver's own limit can leave a torn expandable segment, on which every later request of
    # the process fails (pytorch issue 188008). The assertion about NVML is an out-of-memory error, see _DEVICE.
    r"(?<!NVML_SUCCESS == r )INTERNAL ASSERT FAILED at \S*CUDACachingAllocator\.cpp",
)


def _any(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


_PINNED_RE, _DEVICE_RE, _HOST_RE = _any(_PINNED), _any(_DEVICE), _any(_HOST)
_MAYBE_DEVICE_RE, _STICKY_RE, _LOST_RE = _any(_MAYBE_DEVICE), _any(_STICKY), _any(_LOST)
_REQUEST_RE = re.compile(
    r"(?:tried|trying|try|unable) to allocate\s+([\d.]+)\s*(bytes|[KMGT]i?B)?"
    r"|you tried to allocate (\d+) bytes"
    r"|failed to CUDA \w*alloc(?: async)? (\d+) bytes",
    re.IGNORECASE,
)
REQUESTED_BYTES = "requested_bytes"
"""Attribute of the metered device's errors: the exact size refused, which their text rounds."""

_UNIT_BYTES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class StuckDeviceError(TunedeckError):
    """Work that was queued on the device has not ended within the time limit."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Device memory at one moment: bytes by component, largest live tensors, and on CUDA the allocator's snapshot."""

    components: dict[str, int]
    largest: list[dict[str, Any]]
    snapshot: Any


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One allocation failure. `classify` sets the first three fields from the exception, `catch_oom` the others."""

    kind: MemoryKind
    """On the plain CPU, whose device memory is host memory, `catch_oom` always sets "device"."""
    requested_bytes: int | None
    """None if the error message does not state a size."""
    text: str
    phase: str = ""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    held: MemoryBreakdown | None = None
    """The contents of device memory at the failure."""


def classify(error: BaseException) -> OutOfMemory | None:
    """The allocation failure that `error` itself reports (not its `__cause__` or `__context__`), or None.

    A kernel that needs more shared memory than an SM has (Triton's OutOfResources) is none, because a smaller batch
    does not help. Nor is a sticky error (`is_sticky`), even if its text mentions memory.
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
    """Whether `error` leaves the CUDA context or a communicator unusable, so that nothing can be retried here."""
    return isinstance(error, RuntimeError) and _STICKY_RE.search(str(error)) is not None


def is_lost(error: BaseException) -> bool:
    """Whether the card itself has failed or is gone, so that a new process cannot use it either."""
    return isinstance(error, RuntimeError) and _LOST_RE.search(str(error)) is not None


def beyond_repair(error: BaseException) -> bool:
    """Whether only a new process can use the device: an error of the CUDA driver, or work that never ends."""
    return isinstance(error, (torch.AcceleratorError, StuckDeviceError)) or is_sticky(error)


def flush_autograd() -> None:
    """Run a one-element backward pass, so that the autograd engine frees the graph of a failed backward pass.

    Until then its queue holds the graph with all saved activations. Call this outside the `except` block. Its few bytes
    are allocated outside every dispatch mode, so a full metered device cannot refuse them.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True).add(0))


def clear_frames(error: BaseException) -> None:
    """Clear the locals of every frame in the tracebacks of `error` and of the errors it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


T = TypeVar("T")

STEADY_READINGS, STEADY_PAUSE_SECONDS, STEADY_LIMIT = 3, 0.002, 250
"""Memory is steady when it is the same for so many readings, so long apart; at most half a second is waited. Dropping a
queue is microseconds of work, but its thread may wait for the interpreter's lock."""

ATTEMPTS = 3
"""Tries of an action that cannot be made smaller. A temporary shortage of memory may make it fail twice in a row."""


def catch_oom(
    action: Callable[[], object], device: Device, phase: str, breakdown: Callable[[], MemoryBreakdown] | None = None
) -> OutOfMemory | None:
    """Run `action`; returns the failure if memory ran out during `phase`, else None. Other exceptions are raised
    unchanged. `breakdown`, called before the failed attempt's memory is freed, becomes `OutOfMemory.held`. An
    exception's traceback refers to every frame between raise and handler, and so to the tensors of the failed attempt.
    So the handler only turns it into plain values, and recovery starts after it."""
    try:
        action()
    except (RuntimeError, MemoryError, OSError) as error:
        found = classify(error)
        if found is None:
            raise
        memory = device.memory()
        failure = replace(
            found,
            kind="device" if device.kind == "cpu" else found.kind,
            phase=phase,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            held=breakdown() if breakdown else None,
        )
        clear_frames(error)
        return failure
    return None


def free_failed_graph(device: Device) -> None:
    """Free the graph of a backward pass that ran out of memory. Call it outside the `except` block.

    On CUDA the caller gets the exception at once, while autograd's own thread still frees what it had queued. So this
    returns only when the allocated bytes no longer change, or after STEADY_LIMIT readings.
    """
    flush_autograd()
    if device.kind == "cuda":
        device.wait_until_idle()
        wait_until_steady(lambda: device.memory().allocated_bytes)


def wait_until_steady(read: Callable[[], int], pause: Callable[[float], None] = time.sleep) -> bool:
    """Read every few milliseconds until STEADY_READINGS successive values are equal; False if not after
    STEADY_LIMIT."""
    last, same = read(), 1
    for _ in range(STEADY_LIMIT - 1):
        pause(STEADY_PAUSE_SECONDS)
        now = read()
        same = same + 1 if now == last else 1
        if same == STEADY_READINGS:
            return True
        last = now
    return False


def retry_on_oom(
    action: Callable[[], T], phase: str, device: Device, report: Callable[[OutOfMemory, str, int], None]
) -> T:
    """Run `action` again after an allocation failure, up to ATTEMPTS times in all; then raises MemoryExhaustedError.

    `report` is called with each failure, the remedy ("retry" or "give_up") and the number of the attempt.
    """
    results: list[T] = []
    for number in range(1, ATTEMPTS + 1):
        failure = catch_oom(lambda: results.append(action()), device, phase)
        if failure is None:
            return results[0]
        free_failed_graph(device)
        device.release_cached()
        report(failure, "retry" if number < ATTEMPTS else "give_up", number)
    assert failure is not None
    raise MemoryExhaustedError(
        f"{'out of memory' if failure.kind == 'device' else 'host memory ran out'} in {phase}: {failure.text}",
        fix="end other programs that hold memory, or use a profile with more memory",
    )


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Inside the block, garbage collection skips every object from before it. Nothing is unfrozen if objects had been
    frozen earlier (by `engine.commands.shared`, after the imports).

    With torch and transformers imported and a model built, a collection visits 430,000 objects and takes 250 to 450 ms,
    longer than many micro-batches; limited to the objects of one step, 1 ms.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
