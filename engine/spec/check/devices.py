"""`--devices`: which GPUs of the machine a run may use, read and held against its profile.

Try: `python -c "from engine.spec.check.devices import device_indices; print(device_indices('2,3'))"`
"""

from __future__ import annotations

from engine.errors import UsageError
from engine.spec.schema.run import RunSpec


def parse_device_indices(text: str | None) -> list[int]:
    """`2,3` as [2, 3]. Raises UsageError for anything else."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) != len(parts):
        raise UsageError(f"--devices {text!r} is no list of devices", expected="different indices such as 0 or 2,3")
    return [int(part) for part in parts]


def require_matching_devices(spec: RunSpec) -> None:
    """Raise UsageError where the devices chosen are not what the profile is made for."""
    given, count = spec.limits.devices, spec.profile.device.count
    if given and spec.profile.device.kind != "cuda":
        raise UsageError(
            f"--devices names GPUs, and profile {spec.profile.name!r} has device.kind = {spec.profile.device.kind!r}",
            fix="leave --devices out, or choose a profile for GPUs",
        )
    if given and len(given) != count:
        raise UsageError(
            f"--devices names {len(given)}, and profile {spec.profile.name!r} is made for {count}",
            expected=f"{count} {'index' if count == 1 else 'indices'}",
            fix="name as many, or choose another profile",
        )
