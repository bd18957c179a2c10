"""Devices: where a run's tensors live, how much room there is, and what was measured.

`open_device` turns a run spec into one `Device` (see `engine.device.base`): a CUDA card, the plain CPU, or the metered
device, which counts host memory as if it were a small accelerator. Everything else of the engine talks to that protocol
and never asks which of them it got. What may not live here: budgets (`engine.budget`), and what to do about an
out-of-memory error (`engine.train`); `engine.device.oom` only recognises one.

Try: `tunedeck doctor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.device.base import Device
    from engine.spec.schema.run import RunSpec

__all__ = ["open_device"]


def open_device(spec: RunSpec) -> Device:
    """Open the device that `spec.profile.device` names; the chosen indices are `spec.limits.devices`.

    Raises EnvironmentProblem: no such device, fewer than asked for, a busy one, or a torch build without its kind.
    """
    kind = spec.profile.device.kind
    # Imported per kind: a CUDA run has no use for the meter's patches, and a CPU run must not need NVML.
    if kind == "cuda":
        from engine.device.cuda import open_cuda

        return open_cuda(spec)
    if kind == "metered":
        from engine.device.metered import open_metered

        return open_metered(spec)
    from engine.device.cpu import open_cpu

    return open_cpu(spec)
