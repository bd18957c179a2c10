"""Opens the device of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec
    from engine.device.base import Device


def open_device(spec: RunSpec, *, beside: bool = False) -> Device:
    """Open the device of the profile; `spec.limits.devices` lists the CUDA indices to use. `beside`: on a card that
    other processes use, too, take what they leave free, instead of refusing it.

    Raises EnvironmentProblem: it does not exist, is busy, is not supported by this build of torch, or too few exist.
    """
    kind = spec.profile.device.kind
    # Imported here, so that a CUDA run does not load the metered device's patches of torch, and a CPU run not NVML.
    if kind == "cuda":
        from engine.device.cuda import open_cuda

        return open_cuda(spec, beside=beside)
    if kind == "metered":
        from engine.device.metered import open_metered

        return open_metered(spec)
    from engine.device.cpu import open_cpu

    return open_cpu(spec)
