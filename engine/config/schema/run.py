"""The schema of a hardware profile (the device, how much of it a run may use, recipe keys that it requires), and of a
run spec: the resolved profile, recipe and overrides, which is all that the engine process gets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.config.schema.base import Count, CountOrZero, Name, NonNegative, Positive, Table
from engine.config.schema.recipe import Recipe

DATA_VERSION: Literal[5] = 5
"""How new runs read their rows (`RunSpec.data_version`)."""


class Device(Table):
    """The accelerator, and the part of its memory a run may use."""

    kind: Literal["cuda", "cpu", "metered"]
    """cuda, cpu, or metered: a simulated device that counts CPU bytes and fails allocations above its capacity."""
    count: Count = 1
    """Number of devices on each machine."""
    memory_gib: Positive
    """Total memory of one device in GiB, as the driver reports it; less than its nominal size."""
    reserve_gib: NonNegative = 0.0
    """Memory to leave free on each device, in GiB, including the CUDA context. Capacity is memory minus reserve."""
    host_memory_gib: Positive | None = None
    """Host memory of each machine in GiB, available for offloading; by default that of the machine that makes the
    plan."""
    compute_capability: Positive | None = None
    """CUDA compute capability, such as 9.0; determines bf16 and flash attention when the device is not present."""
    bandwidth_gbs: Positive | None = None
    """Memory bandwidth in GB/s, from the datasheet."""
    peak_tflops: Positive | None = None
    """Dense bf16 (else fp16) tensor throughput in TFLOP/s, from the datasheet; MFU is measured against it."""
    price_per_hour: NonNegative | None = None
    """Cost of one device per hour, in any currency; plans then show the cost of a run."""
    allocator: str | None = None
    """Value of PYTORCH_CUDA_ALLOC_CONF, such as 'expandable_segments:True'."""

    @property
    def capacity_bytes(self) -> int:
        """The capacity in bytes: the memory of one device minus the reserve."""
        return int((self.memory_gib - self.reserve_gib) * 2**30)


class Parallel(Table):
    """How several devices share one run."""

    beside_result = frozenset({"timeout_seconds"})

    strategy: Literal["auto", "single", "replicated", "sharded"] = "auto"
    """A single device, replicated weights, or sharded weights (FSDP2); auto: replicated where the model fits each
    device, else sharded."""
    shard: Literal["gradients", "parameters"] = "parameters"
    """What "sharded" spreads over the devices: gradients and optimizer state (ZeRO-2), or parameters too (ZeRO-3)."""
    sequence: Count = 1
    """Number of devices that share one sequence."""
    timeout_seconds: Positive = 600.0
    """How long ranks wait for each other before all are restarted from the last checkpoint."""


class Nodes(Table):
    """How a run is spread over several machines."""

    count: Count = 1
    """Number of machines."""
    launcher: Literal["slurm", "skypilot"] | None = None
    """The target that `tunedeck launch` writes a script for."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    time_limit: str | None = None
    """Wall-clock limit, in the launcher's notation."""
    cloud: str | None = None
    """SkyPilot cloud."""
    accelerators: str | None = None
    """SkyPilot's name of the GPUs, such as "H100"."""
    max_restarts: CountOrZero = 3
    """How often the ranks are restarted from the last checkpoint before the run fails."""


class Profile(Table):
    """A hardware profile file."""

    beside_result = frozenset({"name", "title", "notes"})

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this file format."""
    kind: Literal["profile"] = "profile"
    """Always "profile"."""
    name: Name = ""
    """Name of the profile. Optional: the name is that of the file without .toml."""
    title: str = ""
    """One line for lists."""
    notes: str = ""
    """Anything a reader should know, such as where the memory figure comes from."""
    device: Device
    parallel: Parallel = Parallel()
    nodes: Nodes = Nodes()
    overrides: dict[str, Any] = {}
    """Recipe keys that this hardware requires, written as in a recipe: [overrides.model] dtype = "float16"."""


class SweepPoint(Table):
    """The sweep that a run belongs to."""

    id: str
    """Name of the sweep, the same in all its runs."""
    point: dict[str, Any]
    """Swept key = its value in this run."""


class Provenance(Table):
    """The files and overrides that a run spec was made from."""

    profile_file: str = ""
    """Path of the profile file, or "shipped:NAME"."""
    profile_sha256: str = ""
    """SHA-256 of the profile file."""
    recipe_file: str = ""
    """Path of the recipe file, or "shipped:NAME"."""
    recipe_sha256: str = ""
    """SHA-256 of the recipe file."""
    set_: list[str] = Field(default=[], alias="set")
    """The overrides, as typed after --set."""
    versions: dict[str, str] = {}
    """Package name = version, of packages that can change the numbers of a run."""
    parallel: str = ""
    """Which keys of the profile's [parallel] the recipe replaced, each with the profile's own value; and what was
    decided where a key is "auto"."""
    sweep: SweepPoint | None = None
    """The sweep that the run is a point of."""


class Limits(Table):
    """Command-line options that are stored with the run and apply again when it is resumed."""

    max_hours: float | None = None
    """Checkpoint and stop after this many hours."""
    wait_seconds: float | None = None
    """Wait up to this many seconds for a busy device before giving up."""
    on_finish: str | None = None
    """Shell command run when the run ends, with TUNEDECK_RUN and TUNEDECK_STATUS set."""
    devices: list[int] = []
    """Indices of the devices to use; empty: the first ones."""
    as_written: bool = False
    """Start with the recipe's own micro-batch and memory settings even if the plan says that they do not fit."""
    trust_remote_code: bool = False
    """Allow model code from the hub; only ever set by the user's own command line."""


class RunSpec(Table):
    """Everything that defines one run. All paths are absolute."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this file format."""
    kind: Literal["run"] = "run"
    """Always "run"."""
    name: str
    """The run's --name, else the recipe's."""
    profile: Profile
    recipe: Recipe
    provenance: Provenance = Provenance()
    limits: Limits = Limits()
    data_version: Literal[1, 2, 3, 4, 5] = DATA_VERSION
    """How rows are read; 4: a blank line separates an instruction and its input; 3: besides, numbers are no text, and
    words such as "None" in a CSV file are empty cells; 2: besides, Alpaca's history, and tools and system beside
    prompts and instructions, are ignored, a conversation whose system turn the template refuses is dropped, and
    sharegpt's function calls are text; 1, of a file without this key: besides, prompts and completions stay outside the
    chat template, and text files are read line by line."""
