"""A CUDA card as a device: chooses the card, caps its memory, and reads the statistics and settings of torch's
allocator."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from engine.device.base import GpuReading, LiveTensor, MemoryReading, holders_of, within
from engine.device.host_copies import CopyStreams, CudaStreams, HostCopy, PlainCopy, Streams, page_locked_copy
from engine.device.nvml import read_gpus
from engine.device.oom import StuckDeviceError, classify
from engine.errors import DeviceBusyError, EnvironmentProblem
from engine.launch.environment import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    from engine.config.schema.run import Device as DeviceTable
    from engine.config.schema.run import RunSpec


LARGEST_SHARE = 1 - 2**-20
"""The largest share of a card's memory that torch enforces as a cap. A share of 1 is none: a request for more than the
card has then maps all of it for a second, page by page (torch 2.11, expandable segments, measured on an H200)."""


def allocator_settings() -> str:
    """The settings in force, such as "expandable_segments:True"; empty for torch's defaults. Call it after CUDA has
    started: the first call makes torch read the environment."""
    # torch before 2.10 has no function for it; what it read can then only be told from the environment.
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def allocator_notices(wanted: str | None) -> list[str]:
    """A notice if a setting in `wanted` (the profile's, such as "expandable_segments:True") is not in force."""
    present = allocator_settings()
    if not wanted or set(_parts(wanted)) <= set(_parts(present)):
        return []
    return [
        f"torch's allocator uses {present or 'its defaults'}, but the profile sets {wanted}: memory can "
        f"fragment more than planned; set {ALLOCATOR_VARIABLES[0]}={wanted} in the environment of the process"
    ]


def _parts(settings: str) -> list[str]:
    return [part.strip() for part in settings.split(",") if part.strip()]


class CudaDevice:
    """One CUDA card, or a MIG slice as it is. Implements `engine.device.base.Device`."""

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
        # a batch (0.13 s on an H100). Rows of real lengths make a new shape of nearly every micro-batch, so it is
        # switched on for those alone where it is worth it (`engine.model.cudnn_attention`).
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _cap(self, capacity_bytes: int) -> None:
        """Lets a large card stand in for a smaller one. This limits only torch's allocator: the CUDA context, NCCL and
        other libraries need more, for which the profile sets `reserve_gib` aside."""
        self.capacity_bytes = capacity_bytes
        share = min(capacity_bytes / self._total_bytes, LARGEST_SHARE)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    @property
    def available_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return min(self.capacity_bytes, torch.cuda.memory_reserved(self.torch_device) + free_bytes)

    @property
    def supports_bfloat16(self) -> bool:
        """True for Ampere and later cards. Earlier cards emulate bf16, which is slower than fp16."""
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    @contextmanager
    def activate(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def fit_capacity(self) -> list[str]:
        """Lower the cap by the CUDA context and the communicators of ranks, which are outside torch's allocator. torch
        refuses a request above the cap cleanly; one that the driver refuses can damage an expandable segment."""
        left_bytes, missing_bytes = self.available_bytes, self.capacity_bytes - self.available_bytes
        if missing_bytes <= 0:
            return []
        self._cap(left_bytes)
        return [
            f"the CUDA context and communicators take {_gib(missing_bytes)} more than device.reserve_gib; "
            f"{_gib(left_bytes)} are left for training"
        ]

    def wait_until_idle(self) -> None:
        """Waits for NCCL's and FSDP2's streams too. A collective of which a rank is missing never ends:
        StuckDeviceError."""
        wait_for_card(partial(torch.cuda.synchronize, self.torch_device), self.patience_seconds)

    def memory(self) -> MemoryReading:
        statistics = torch.cuda.memory_stats(self.torch_device)
        return MemoryReading(
            allocated_bytes=statistics.get("allocated_bytes.all.current", 0),
            reserved_bytes=statistics.get("reserved_bytes.all.current", 0),
            peak_bytes=statistics.get("allocated_bytes.all.peak", 0),
            alloc_retries=statistics.get("num_alloc_retries", 0),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        """Waits first: torch waits only for the stream that a block was allocated on before it unmaps the block
        (expandable segments; c10/cuda/CUDACachingAllocator.cpp, `unmapHandles`). After a failed attempt, a collective
        on another stream may still write to it: an illegal address, after which the process cannot use the card."""
        gc.collect()
        self.wait_until_idle()
        torch.cuda.empty_cache()

    @contextmanager
    def host_region(self) -> Iterator[None]:
        """Does nothing: torch's allocator never counts host tensors."""
        yield

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uses torch's host allocator, which keeps freed blocks for the next copy.

        Containers and Windows may cap page-locked memory far below the machine's. After the first refusal, with a
        notice, `tensor` itself is returned: copies to the card are then synchronous.
        """
        pinned = self._pinned(tensor.pin_memory) if self._can_pin else None
        return tensor if pinned is None else pinned

    def _pinned(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """None, with a notice and no more pinning, if no page-locked memory is left."""
        try:
            return allocate()
        except RuntimeError as error:
            if classify(error) is None:
                raise
            self._note_refusal(str(error).splitlines()[0])
            return None

    def _note_refusal(self, reason: str) -> None:
        self.stop_pinning()
        self.notices.append(f"no page-locked host memory is available ({reason}); copies to the GPU are slower")

    def stop_pinning(self) -> None:
        self._can_pin = False

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Asynchronous if `tensor` is in pinned memory."""
        return tensor.detach().to(self.torch_device, non_blocking=tensor.is_pinned(), copy=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    def park(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-locks the copy in place. If the driver refuses, a notice is added, and this copy and later ones are in
        ordinary memory: copying them is slower, and the host waits for it."""
        if not self._can_pin or not tensor.is_contiguous():
            return self.download(tensor)
        copy, code = page_locked_copy(tensor, torch.cuda.cudart())
        if code:
            self._note_refusal(f"CUDA error {code}")
            with suppress(RuntimeError):  # CUDA reports the refusal a second time, to the next kernel: this one
                torch.zeros(1, device=self.torch_device)
        return copy

    def offload(self, tensor: torch.Tensor) -> HostCopy:
        """Copies on a separate stream; without page-locked memory the copy is complete on return."""
        host = self._pinned(partial(torch.empty_like, tensor, device="cpu", pin_memory=True)) if self._can_pin else None
        return PlainCopy(self.download(tensor), self.upload) if host is None else self._copies.send(tensor, host)

    def settle_offloads(self) -> None:
        self._copies.settle()

    @cached_property
    def streams(self) -> Streams:
        return CudaStreams(self.torch_device)

    @cached_property
    def _copies(self) -> CopyStreams:
        return CopyStreams(self.streams, self.torch_device)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.download(tensor)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does nothing: the caching allocator counts every tensor on the card."""

    def readings(self) -> list[GpuReading]:
        return read_gpus([self._uuid])

    def largest(self, count: int) -> list[LiveTensor]:
        return []

    def snapshot(self) -> Any:
        """The allocator's segments and blocks, in the format of `torch.cuda.memory._dump_snapshot`."""
        return torch.cuda.memory._snapshot(self.torch_device)


def open_cuda(spec: RunSpec, *, beside: bool = False) -> CudaDevice:
    """Open the first of the profile's cards; `beside` other processes, with no more than they leave free. Raises
    EnvironmentProblem: no CUDA, fewer cards than asked for, or, if not `beside`, other processes hold memory of the
    first card."""
    table = spec.profile.device
    _require_cuda()
    indices = choose_indices(spec.limits.devices, table.count, torch.cuda.device_count())
    index = indices[0]
    properties = torch.cuda.get_device_properties(index)
    notices = allocator_notices(table.allocator)
    uuid = _nvml_uuid(str(properties.uuid))
    capacity_bytes = table.capacity_bytes
    for reading in read_gpus([uuid]):
        if beside:
            capacity_bytes = min(capacity_bytes, max(0, reading.total_bytes - reading.used_bytes))
        wanted_bytes = 0 if beside else min(capacity_bytes, properties.total_memory)
        notices += check_free(reading, wanted_bytes)
    notices += compare_size(table, properties.name, properties.total_memory)
    return CudaDevice(index, capacity_bytes, uuid, notices)


def wait_for_card(synchronize: Callable[[], None], seconds: float | None) -> None:
    """Raises what `synchronize` raises, and StuckDeviceError if it takes longer than `seconds` (None: no limit)."""
    within(
        seconds,
        synchronize,
        lambda: StuckDeviceError(
            f"work queued on the GPU has not finished after {seconds:.0f} s: a rank is missing in a "
            "collective, or a kernel hangs",
            fix="the run continues from its last checkpoint",
        ),
    )


def _require_cuda() -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise EnvironmentProblem(
            f"the profile needs a CUDA device, but torch {torch.__version__} was built without CUDA",
            expected="a CUDA build of torch",
            fix="install one (https://pytorch.org/get-started), or run here with -p demo or a profile of kind cpu",
        )
    raise EnvironmentProblem(
        "the profile needs a CUDA device, but torch finds none",
        expected="a visible NVIDIA GPU with a driver that supports CUDA " + torch.version.cuda,
        fix="see `tunedeck doctor` and CUDA_VISIBLE_DEVICES, or run here with -p demo or a profile of kind cpu",
    )


def choose_indices(asked: list[int], count: int, present: int) -> list[int]:
    """The first `count` of `asked`, or if that is empty, 0 to `count` - 1.

    Raises EnvironmentProblem: fewer indices than `count`, or an index outside the `present` cards of this machine.
    """
    indices = asked or list(range(count))
    missing = [index for index in indices if not 0 <= index < present]
    if missing or len(indices) < count:
        raise EnvironmentProblem(
            f"devices {', '.join(map(str, indices))} were requested, but this machine has {present}",
            expected=f"{count} of the devices 0 to {present - 1}",
            fix="choose with --devices, or a profile with fewer devices",
        )
    return indices[:count]


def check_free(reading: GpuReading, capacity_bytes: int) -> list[str]:
    """Notices about other processes on a card. Raises DeviceBusyError if they leave less than `capacity_bytes` free."""
    holders = holders_of(reading)
    free_bytes = reading.total_bytes - reading.used_bytes
    # The driver itself uses a few hundred MiB: with no other process visible, that is not a busy card.
    held = bool(holders) or reading.used_bytes > 2**30
    if held and free_bytes < capacity_bytes:
        raise DeviceBusyError(
            f"GPU {reading.index} ({reading.name}) is busy: {_gib(free_bytes)} of {_gib(reading.total_bytes)} is free; "
            f"held by {holders or 'processes that are not visible from here'}",
            expected=f"{_gib(capacity_bytes)} free (memory_gib of the profile minus its reserve)",
            fix="end those processes, wait with --wait SECONDS, choose another GPU with --devices, or lower "
            "device.memory_gib in the profile",
        )
    return [f"GPU {reading.index} is shared with {holders}"] if holders else []


def compare_size(table: DeviceTable, name: str, total_bytes: int) -> list[str]:
    """A notice if the card has less memory than the profile says."""
    # A tenth of a GiB of slack: drivers report slightly different totals for the same card.
    if table.memory_gib <= total_bytes / 2**30 + 0.1:
        return []
    return [
        (f"the profile sets {table.memory_gib:g} GiB, but {name} has {_gib(total_bytes)}; the plan may be too large")
    ]


def _nvml_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _gib(size_bytes: int | None) -> str:
    return "an unknown amount" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
