"""The settings of torch's caching allocator that are in force in this process.

torch reads them from the environment once, when CUDA starts; see `engine.launch.environment`.

Try: `python -c "from engine.device.allocator import *; print(repr(allocator_settings()))"`
"""

from __future__ import annotations

import os

import torch

from engine.launch.environment import ALLOCATOR_VARIABLES


def allocator_settings() -> str:
    """The settings in force, such as "expandable_segments:True"; empty for torch's defaults. Must be called after CUDA
    has started, because the first call makes torch read the environment."""
    # torch before 2.10 has no function for it; what it read can then only be told from the environment.
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def allocator_notices(wanted: str | None) -> list[str]:
    """Return a notice, in a list, if a setting in `wanted` (the profile's, such as "expandable_segments:True") is not
    in force; else an empty list."""
    present = allocator_settings()
    if not wanted or set(_parts(wanted)) <= set(_parts(present)):
        return []
    return [
        f"torch's allocator runs with {present or 'its defaults'}, and the profile asks for {wanted}: memory can "
        f"fragment more than planned; set {ALLOCATOR_VARIABLES[0]}={wanted} where the process is started"
    ]


def _parts(settings: str) -> list[str]:
    return [part.strip() for part in settings.split(",") if part.strip()]
