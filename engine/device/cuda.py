"""A CUDA card as a device: chooses the card, caps its memory, and reads the statistics of torch's allocator.

The cap is set with `set_per_process_memory_fraction`, so that a large card can stand in for a smaller one. The cap
limits only what torch's allocator takes from the driver. The CUDA context, NCCL and other libraries need additional
memory, for which the profile sets `reserve_gib` aside. MIG slices are used as they are, never reconfigured.

Try: `tunedeck doctor`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from engine.device.allocator import allocator_notices
from engine.device.base import GpuReading, LiveTensor, MemoryReading
from engine.device.bounded import within
from engine.device.host_copies import CopyStreams, CudaStreams, HostCopy, PlainCopy, Streams
from engine.device.nvml import read_gpus
from engine.device.oom import StuckDeviceError, classify
from engine.device.page_lock import page_locked_copy
from engine.errors import DeviceBusyError, EnvironmentProblem

if TYPE_CHECKING:
    from engine.spec.schema.profile import Device as DeviceTable
    from engine.spec.schema.run import RunSpec

class CudaDevice:
    """One CUDA card. Implements `engine.device.base.Device`."""

    kind = "cuda"
    simulated = False
    asynchronous = True

    def __init__(self, index: int, capacity_bytes: int, uuid: str, notices: list[str]) -> None:
        """Cap the memory of card `index` at `capacity_bytes` or its total, whichever is smaller."""
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.name: str = properties.name
        self.notices = notices
        self.patience_seconds: float | None = None
        self._uuid = uuid
        self._can_pin = True
        self._total_bytes: int = properties.total_memory
        self._cap(min(capacity_bytes, self._total_bytes))
        # On Hopper and Blackwell torch prefers cuDNN's attention, which builds an execution plan for each new shape of
        # a batch (reported: 0.44 s forward, 0.55 s backward). Rows of real lengths make a new shape of nearly every
        # micro-batch. What cuDNN computes, the flash and memory-efficient kernels compute, too.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _cap(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        torch.cuda.set_per_process_memory_fraction(capacity_bytes / self._total_bytes, self.torch_device)

    @property
    def available_bytes(self) -> int:
        """Bytes reserved by torch's allocator plus the bytes that are free in the driver, at most the capacity."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return min(self.capacity_bytes, torch.cuda.memory_reserved(self.torch_device) + free_bytes)

    @property
    def supports_bfloat16(self) -> bool:
        """True for Ampere and later cards. Earlier cards emulate bf16, which is slower than fp16."""
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: inside the block, this card is the current CUDA device of the calling thread."""
        with torch.cuda.device(self.torch_device):
            yield

    def synchronize(self) -> None:
        """Wait for the card's queued kernels; their errors are raised here."""
        torch.cuda.synchronize(self.torch_device)

    def fit_capacity(self) -> list[str]:
        """Lower the capacity, and torch's cap, to what is left beside memory taken outside torch's allocator: the CUDA
        context and the communicators of ranks. torch refuses a request above the cap cleanly; a request that the driver
        refuses can damage an expandable segment. Returns a list with a notice for the user if the capacity was lowered,
        else an empty list."""
        left_bytes, missing_bytes = self.available_bytes, self.capacity_bytes - self.available_bytes
        if missing_bytes <= 0:
            return []
        self._cap(left_bytes)
        return [
            f"the CUDA context and communicators take {_gib(missing_bytes)} more than device.reserve_gib leaves them; "
            f"{_gib(left_bytes)} are left to train with"
        ]

    def wait_until_idle(self) -> None:
        """Wait until all streams of the card, including those of NCCL and of FSDP2, have run what is queued on them. A
        collective of which a rank is missing never ends: StuckDeviceError is raised after `patience_seconds`."""
        wait_for_card(partial(torch.cuda.synchronize, self.torch_device), self.patience_seconds)

    def memory(self) -> MemoryReading:
        """Read the statistics of torch's caching allocator."""
        statistics = torch.cuda.memory_stats(self.torch_device)
        return MemoryReading(
            allocated_bytes=statistics.get("allocated_bytes.all.current", 0),
            reserved_bytes=statistics.get("reserved_bytes.all.current", 0),
            peak_bytes=statistics.get("allocated_bytes.all.peak", 0),
            alloc_retries=statistics.get("num_alloc_retries", 0),
        )

    def reset_peak(self) -> None:
        """Restart peak tracking from the bytes allocated now."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Collect garbage, wait until the card is idle, and give unused blocks back to the driver.

        torch waits only for the stream that a block was allocated on before it unmaps the block (expandable segments;
        c10/cuda/CUDACachingAllocator.cpp, `unmapHandles`). After a failed attempt, a collective on another stream may
        still write to it: an illegal address, after which the process cannot use the card. Raises StuckDeviceError.
        """
        gc.collect()
        self.wait_until_idle()
        torch.cuda.empty_cache()

    @contextmanager
    def host_region(self) -> Iterator[None]:
        """Context manager that does nothing, because torch's allocator never counts host tensors."""
        yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to page-locked memory of torch's host allocator, which keeps freed blocks for the next copy.

        Containers and Windows may cap page-locked memory far below the machine's memory. After the first refusal a
        notice is added to `notices`, and from then on `tensor` itself is returned: copies to the card are then
        synchronous.
        """
        pinned = self._pinned(tensor.pin_memory) if self._can_pin else None
        return tensor if pinned is None else pinned

    def _pinned(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return the page-locked tensor that `allocate` returns. If no page-locked memory is left, add a notice, stop
        pinning and return None."""
        try:
            return allocate()
        except RuntimeError as error:
            if classify(error) is None:
                raise
            self._note_refusal(str(error).splitlines()[0])
            return None

    def _note_refusal(self, reason: str) -> None:
        """Stop pinning, and add a notice that says so with the `reason`."""
        self.stop_pinning()
        self.notices.append(f"no page-locked host memory is left ({reason}); copies to the card wait for it")

    def stop_pinning(self) -> None:
        """From now on copy to the card from pageable memory: `pin` returns the tensors that it is given."""
        self._can_pin = False

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the card; the copy is asynchronous if `tensor` is in pinned memory."""
        return tensor.detach().to(self.torch_device, non_blocking=tensor.is_pinned(), copy=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the host; the copy is complete on return."""
        return tensor.detach().to("cpu", copy=True)

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to host memory that is page-locked in place; the copy is complete on return. If the driver
        refuses, a notice is added to `notices`, and this copy and later ones are in ordinary memory: copying them is
        slower, and the host waits for it."""
        if not self._can_pin or not tensor.is_contiguous():
            return self.download(tensor)
        copy, code = page_locked_copy(tensor, torch.cuda.cudart())
        if code:
            self._note_refusal(f"CUDA error {code}")
            with suppress(RuntimeError):  # CUDA reports the refusal a second time, to the next kernel: this one
                torch.zeros(1, device=self.torch_device)
        return copy

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy `tensor` to page-locked memory, on a separate stream. Without page-locked memory, the copy is
        complete on return."""
        host = self._pinned(partial(torch.empty_like, tensor, device="cpu", pin_memory=True)) if self._can_pin else None
        return PlainCopy(self.download(tensor), self.upload) if host is None else self._copies.send(tensor, host)

    def settle_offloads(self) -> None:
        """Make the computation wait for the copies of offloads under way, then free the device tensors that they read
        or write."""
        self._copies.settle()

    @cached_property
    def streams(self) -> Streams:
        """The card's streams for copies: each is made once."""
        return CudaStreams(self.torch_device)

    @cached_property
    def _copies(self) -> CopyStreams:
        return CopyStreams(self.streams, self.torch_device)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` to the host, as `download` does."""
        return self.download(tensor)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does nothing: the caching allocator counts every tensor on the card."""

    def readings(self) -> list[GpuReading]:
        """Return NVML's reading of this card; an empty list if NVML does not find the card's UUID."""
        return read_gpus([self._uuid])

    def largest(self, count: int) -> list[LiveTensor]:
        """Return an empty list: the caching allocator tracks blocks, not tensors."""
        return []

    def snapshot(self) -> Any:
        """Return segments and blocks of the caching allocator, in the format of `torch.cuda.memory._dump_snapshot`."""
        return torch.cuda.memory._snapshot(self.torch_device)


def open_cuda(spec: RunSpec) -> CudaDevice:
    """Check that as many cards exist as the profile asks for and that the first is free, then open the first.

    Raises EnvironmentProblem: no CUDA, fewer cards than asked for, or other processes hold memory of the first card.
    """
    table = spec.profile.device
    _require_cuda()
    indices = choose_indices(spec.limits.devices, table.count, torch.cuda.device_count())
    index = indices[0]
    properties = torch.cuda.get_device_properties(index)
    notices = allocator_notices(table.allocator)
    uuid = _nvml_uuid(str(properties.uuid))
    for reading in read_gpus([uuid]):
        notices += check_free(reading, min(table.capacity_bytes, properties.total_memory))
    notices += compare_size(table, properties.name, properties.total_memory)
    return CudaDevice(index, table.capacity_bytes, uuid, notices)


def wait_for_card(synchronize: Callable[[], None], seconds: float | None) -> None:
    """Call `synchronize`, which returns when the card is idle. Raises what it raises, and StuckDeviceError if it has
    not returned after `seconds` (None: no limit)."""
    within(
        seconds,
        synchronize,
        lambda: StuckDeviceError(
            f"work queued on the GPU has not ended after {seconds:.0f} s: a rank is missing in a collective, or a "
            "kernel hangs",
            fix="the run goes on from its last checkpoint",
        ),
    )


def _require_cuda() -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise EnvironmentProblem(
            f"the profile asks for a CUDA device, but torch {torch.__version__} was built without CUDA",
            expected="a CUDA build of torch",
            fix="install one (https://pytorch.org/get-started), or run here with -p demo or a profile of kind cpu",
        )
    raise EnvironmentProblem(
        "the profile asks for a CUDA device, but torch finds none",
        expected="a visible NVIDIA GPU with a driver that supports CUDA " + torch.version.cuda,
        fix="see `tunedeck doctor` and CUDA_VISIBLE_DEVICES, or run here with -p demo or a profile of kind cpu",
    )


def choose_indices(asked: list[int], count: int, present: int) -> list[int]:
    """Choose the indices of the `count` cards to use: the first of `asked`, or if that is empty, 0 to `count` - 1.

    Raises EnvironmentProblem: fewer indices than `count`, or an index outside the `present` cards of this machine.
    """
    indices = asked or list(range(count))
    missing = [index for index in indices if not 0 <= index < present]
    if missing or len(indices) < count:
        raise EnvironmentProblem(
            f"devices {', '.join(map(str, indices))} were asked for; this machine has {present}",
            expected=f"{count} of the devices 0 to {present - 1}",
            fix="choose with --devices, or a profile with fewer devices",
        )
    return indices[:count]


def check_free(reading: GpuReading, capacity_bytes: int) -> list[str]:
    """Return notices about other processes on a card, an empty list if there are none. Raises DeviceBusyError if they
    leave less than `capacity_bytes` free."""
    others = [process for process in reading.processes if process.pid != os.getpid()]
    holders = ", ".join(f"pid {process.pid} ({process.name}, {_gib(process.used_bytes)})" for process in others)
    free_bytes = reading.total_bytes - reading.used_bytes
    # The driver itself uses a few hundred MiB: with no other process visible, that is not a busy card.
    held = bool(others) or reading.used_bytes > 2**30
    if held and free_bytes < capacity_bytes:
        raise DeviceBusyError(
            f"GPU {reading.index} ({reading.name}) is busy: {_gib(free_bytes)} of {_gib(reading.total_bytes)} is free; "
            f"held by {holders or 'processes that are not visible from here'}",
            expected=f"{_gib(capacity_bytes)} free, the profile's memory minus its reserve",
            fix="end those processes, wait with --wait SECONDS, choose another card with --devices, "
            "or lower device.memory_gib in the profile",
        )
    return [f"GPU {reading.index} is shared with {holders}"] if holders else []


def compare_size(table: DeviceTable, name: str, total_bytes: int) -> list[str]:
    """Return a notice, in a list, if the card has less memory than the profile says; else an empty list."""
    # A tenth of a GiB of slack: drivers report slightly different totals for the same card.
    if table.memory_gib <= total_bytes / 2**30 + 0.1:
        return []
    return [f"the profile says {table.memory_gib:g} GiB, but {name} has {_gib(total_bytes)}; the plan may be too large"]


def _nvml_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _gib(size_bytes: int | None) -> str:
    return "an unknown amount" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
