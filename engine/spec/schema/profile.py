"""The hardware profile: which device, how much of it, and what that hardware insists on.

Data only. Reading and merging live in `engine.spec.load`; nothing here looks at the machine.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.spec.schema.base import Count, CountOrZero, Name, NonNegative, Positive, Table


class Device(Table):
    """The accelerator, and the part of its memory a run may use."""

    kind: Literal["cuda", "cpu", "metered"]
    """cuda, cpu, or metered: a simulated device in host memory that counts every allocation and refuses above a cap."""
    count: Count = 1
    """How many of them."""
    memory_gib: Positive
    """What the driver reports as total, in GiB, for one device; never the number on the box."""
    reserve_gib: NonNegative = 0.0
    """Left free on each device, in GiB. Capacity is memory minus reserve."""
    compute_capability: Positive | None = None
    """CUDA compute capability, such as 9.0; decides bf16 and flash attention before the device is seen."""
    bandwidth_gbs: Positive | None = None
    """Memory bandwidth in GB/s, from the datasheet."""
    peak_tflops: Positive | None = None
    """Dense bf16 (else fp16) tensor throughput in TFLOP/s, from the datasheet; MFU is measured against it."""
    allocator: str | None = None
    """Value of PYTORCH_CUDA_ALLOC_CONF, such as 'expandable_segments:True'."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes one device may hold for this run: memory minus reserve."""
        return int((self.memory_gib - self.reserve_gib) * 2**30)


class Parallel(Table):
    """How several devices share one run."""

    strategy: Literal["single", "replicated", "sharded"] = "single"
    """A single device, replicated weights, or sharded weights (FSDP2)."""
    shard: Literal["gradients", "parameters"] = "parameters"
    """What "sharded" spreads over the devices: gradients and optimizer state (ZeRO-2), or parameters too (ZeRO-3)."""
    sequence: Count = 1
    """How many devices share one sequence."""
    timeout_seconds: Positive = 600.0
    """How long ranks wait for each other before the supervisor restarts the attempt."""


class Nodes(Table):
    """Several machines."""

    count: Count = 1
    """How many machines."""
    launcher: Literal["slurm", "skypilot"] | None = None
    """What `tunedeck launch` writes a script for."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    time_limit: str | None = None
    """Wall-clock limit, in the launcher's own notation."""
    cloud: str | None = None
    """SkyPilot cloud."""
    accelerators: str | None = None
    """SkyPilot's name of the GPUs, such as "H100"."""
    max_restarts: CountOrZero = 3
    """How often an attempt is restarted from its last checkpoint."""


class Profile(Table):
    """A hardware profile file."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of this file format."""
    kind: Literal["profile"] = "profile"
    """Always "profile"."""
    name: Name
    """Equals the file's stem."""
    title: str = ""
    """One line for lists."""
    notes: str = ""
    """Anything a reader should know, such as where the memory figure comes from."""
    device: Device
    parallel: Parallel = Parallel()
    nodes: Nodes = Nodes()
    overrides: dict[str, Any] = {}
    """Recipe keys this hardware insists on, written like a recipe: [overrides.model] dtype = "float16"."""
