"""Devices, on which a run's tensors are allocated: how much memory they have, and how much is in use.

`open_device` turns a run spec into one `Device` (the protocol in `engine.device.base`): a CUDA card, the plain CPU, or
the metered device, a simulated accelerator that counts bytes of host memory. The rest of the engine works with the
protocol alone. Memory predictions are in `engine.budget`; what is done about an out-of-memory error is decided in
`engine.train`, while `engine.device.oom` recognises one and `engine.device.catch_oom` catches it.

Try: `tunedeck doctor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.device.base import Device
    from engine.spec.schema.run import RunSpec

__all__ = ["open_device"]


def open_device(spec: RunSpec) -> Device:
    """Open the device that `spec.profile.device` describes; `spec.limits.devices` lists the CUDA indices to use.

    Raises EnvironmentProblem: the device does not exist, is busy, is not supported by this build of torch, or there are
    fewer devices than asked for.
    """
    kind = spec.profile.device.kind
    # Imported here, so that a CUDA run does not load the metered device's patches of torch, and a CPU run not NVML.
    if kind == "cuda":
        from engine.device.cuda import open_cuda

        return open_cuda(spec)
    if kind == "metered":
        from engine.device.metered import open_metered

        return open_metered(spec)
    from engine.device.cpu import open_cpu

    return open_cpu(spec)
