"""Proof: every kind of collective gives exact results at a size at which transfers between devices are cut into many
pieces. Also measures the bandwidth of each kind.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

from engine.distributed.warm_up import run_each_collective
from engine.errors import EnvironmentProblem
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup

CARD_BYTES, HOST_BYTES = 256 * 2**20, 2**20
"""Bytes of the buffer of each collective, on CUDA cards and on simulated devices."""
NUMBER_BYTES = 4


def prove(setup: TrainingSetup) -> str:
    """Run every kind of collective twice on large buffers, and time the second time. All ranks call this; it votes.
    Returns what was shown, in a few words. Raises DisprovedError if a result is wrong on this rank, and
    torch.OutOfMemoryError if the buffers do not fit."""
    device, size = setup.context.device, setup.context.ranks.size
    buffer_bytes = CARD_BYTES if device.kind == "cuda" else HOST_BYTES
    values, votes = buffer_bytes // NUMBER_BYTES // size, setup.context.ranks.voted_group()
    with device.host_region():
        try:
            for _ in range(2):
                seconds = run_each_collective(
                    device.torch_device, values=values, ready=votes.ready, synchronize=device.synchronize
                )
        except EnvironmentProblem as wrong:
            raise DisprovedError(f"{wrong.found} at {_mib(buffer_bytes)}") from wrong
    speeds = [f"{kind} {_gb_per_second(kind, buffer_bytes, size, took)}" for kind, took in seconds.items()]
    return f"collectives of {_mib(buffer_bytes)} are exact: {', '.join(speeds)} (bus bandwidth)"


def _gb_per_second(kind: str, buffer_bytes: int, size: int, seconds: float) -> str:
    """The bandwidth as NVIDIA's nccl-tests define it (busbw), which can be compared with that of the hardware at any
    number of ranks: the bytes that each link must carry, by the time taken."""
    share = {"broadcast": 1.0, "all-reduce": 2 * (size - 1) / size}.get(kind, (size - 1) / size)
    return f"{share * buffer_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB"
