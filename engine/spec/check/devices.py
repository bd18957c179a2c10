"""The devices of a start: the option `--devices`, parsed and checked against the profile, and the number of machines.

Try: `python -c "from engine.spec.check.devices import parse_device_indices as p; print(p('2,3'))"`
"""

from __future__ import annotations

from engine.errors import UsageError
from engine.spec.schema.run import RunSpec


def parse_device_indices(text: str | None) -> list[int]:
    """Parse a list of device indices such as `2,3`; None gives an empty list. Raises UsageError for any other text."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) != len(parts):
        raise UsageError(f"--devices {text!r} is not a list of devices", expected="different indices such as 0 or 2,3")
    return [int(part) for part in parts]


def require_matching_devices(spec: RunSpec) -> None:
    """Raise UsageError where the devices chosen by `--devices` do not match the kind or the number of the profile's
    devices."""
    given, count = spec.limits.devices, spec.profile.device.count
    if given and spec.profile.device.kind != "cuda":
        raise UsageError(
            f"--devices names GPUs, and profile {spec.profile.name!r} has device.kind = {spec.profile.device.kind!r}",
            fix="leave --devices out, or choose a profile for GPUs",
        )
    if given and len(given) != count:
        raise UsageError(
            f"--devices names {len(given)}, and profile {spec.profile.name!r} has device.count = {count}",
            expected=f"{count} {'index' if count == 1 else 'indices'}",
            fix="name as many, or choose another profile",
        )


def require_launcher(spec: RunSpec) -> None:
    """Raise UsageError for a profile of several machines: Tunedeck starts no process on another machine."""
    machines = spec.profile.nodes.count
    if machines > 1:
        raise UsageError(
            f"profile {spec.profile.name!r} has {machines} machines, and this command starts processes on one",
            fix="write a script that starts the run on all of them: tunedeck launch with the same -p and -r",
        )
