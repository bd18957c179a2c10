"""What this machine is, and how the profiles that can be chosen stand to it: which one is this machine, which is not.

The detected device becomes a profile file in the state folder, so that the command shown on the screen can name it.

Try: `python -c "from tui.files.catalog import *; print(*profile_entries(read_machine()), sep='\\n')"`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import TunedeckError
from engine.journal.index import state_folder
from engine.spec.files.detect import count_devices, detect_device
from engine.spec.files.find import SpecFile, SpecKind, find_spec_file, list_spec_files
from engine.spec.files.share import write_new_file
from engine.spec.files.templates import new_profile
from engine.spec.load import load_spec_file
from engine.spec.schema.profile import Device, Profile
from engine.spec.schema.recipe import Recipe

SAME_MEMORY = 0.01
"""Two cards whose totals differ by less than this share are the same product: drivers differ by some MiB."""


@dataclass(frozen=True)
class Machine:
    """The first device, how many there are, and how the detected profile reads."""

    device: Device
    count: int
    title: str
    notes: str

    @property
    def stem(self) -> str:
        """A name for the detected profile: the device's own, in the letters a name may have."""
        if self.device.kind == "cpu":
            return "this-cpu"
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:60] or "this-gpu"


@dataclass(frozen=True)
class Entry:
    """A profile or recipe that can be chosen. `text` is what -p or -r takes."""

    text: str
    title: str
    origin: str
    path: Path
    trouble: str = ""
    """Why it cannot be used as it is, or does not match this machine; empty where all is well."""
    broken: bool = False
    here: bool = False
    """A profile that is this very machine."""


def read_machine() -> Machine:
    """Look at this machine."""
    table, title, notes = detect_device()
    return Machine(Device.model_validate(table), count_devices(), title, notes)


def detected_profile(machine: Machine) -> Path:
    """Write the detected profile into the state folder and return its path. Raises UsageError where it cannot be."""
    device = machine.device.model_dump(exclude_none=True)
    text = new_profile(machine.stem, device, title=machine.title, notes=machine.notes).encode()
    target = state_folder() / "machine" / f"{machine.stem}.toml"
    if not target.is_file() or target.read_bytes() != text:
        write_new_file(target, text, force=True)
    return target


def profile_entries(machine: Machine) -> list[Entry]:
    """Every profile, this machine first, then those it can stand for, then the others with what does not match."""
    entries = [_entry("profile", located, machine) for located in list_spec_files("profile")]
    if not any(entry.here for entry in entries):
        entries.append(_detected(machine))
    return sorted(entries, key=lambda entry: (not entry.here, entry.broken, bool(entry.trouble)))


def recipe_entries() -> list[Entry]:
    """Every recipe: the project's and the user's own before the shipped ones."""
    entries = [_entry("recipe", located, None) for located in list_spec_files("recipe")]
    return sorted(entries, key=lambda entry: (entry.broken, entry.origin == "shipped"))


def entry_of(kind: SpecKind, text: str, machine: Machine) -> Entry:
    """The entry of a name or path that is in no list."""
    try:
        located = find_spec_file(kind, text)
    except TunedeckError as error:
        return Entry(text, "", "path", Path(text), error.found, broken=True)
    entry = _entry(kind, located, machine if kind == "profile" else None)
    return Entry(text, entry.title, entry.origin, entry.path, entry.trouble, entry.broken, entry.here)


def _detected(machine: Machine) -> Entry:
    try:
        path = detected_profile(machine)
    except (TunedeckError, OSError) as error:
        reason = error.found if isinstance(error, TunedeckError) else f"{error.filename}: {error.strerror}"
        return Entry(machine.stem, machine.title, "detected", Path(machine.stem), reason, broken=True)
    return Entry(str(path), machine.title, "detected", path, here=True)


def _entry(kind: SpecKind, located: SpecFile, machine: Machine | None) -> Entry:
    try:
        table = load_spec_file(kind, located)
    except TunedeckError as error:
        return Entry(located.name, "", located.origin, located.path, error.found.splitlines()[0], broken=True)
    title = table.title if isinstance(table, (Profile, Recipe)) else ""
    if machine is None or not isinstance(table, Profile):
        return Entry(located.name, title, located.origin, located.path)
    return Entry(
        located.name, title, located.origin, located.path, mismatch(table, machine), here=_is_here(table, machine)
    )


def mismatch(profile: Profile, machine: Machine) -> str:
    """Why this machine cannot run the profile; empty where it can. A smaller card may be rehearsed on a larger one."""
    wanted, found = profile.device, machine.device
    if wanted.kind == "metered":
        return ""
    if wanted.kind == "cuda" and found.kind != "cuda":
        return "this machine has no CUDA device"
    if wanted.kind == "cpu" and found.kind == "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return "" if wanted.memory_gib <= memory else f"this machine has {memory:.1f} GiB of host memory"
    if wanted.kind == "cuda" and wanted.count > machine.count:
        return f"this machine has {machine.count} GPU{'s' * (machine.count > 1)}, not {wanted.count}"
    if wanted.memory_gib > found.memory_gib * (1 + SAME_MEMORY):
        return f"this machine's {machine.title} has {found.memory_gib:.1f} GiB, not {wanted.memory_gib:.1f}"
    if (wanted.compute_capability or 0) > (found.compute_capability or 0):
        return f"this machine computes at {found.compute_capability}, not {wanted.compute_capability}"
    return ""


def _is_here(profile: Profile, machine: Machine) -> bool:
    wanted, found = profile.device, machine.device
    close = abs(wanted.memory_gib - found.memory_gib) <= SAME_MEMORY * found.memory_gib
    same = wanted.kind == found.kind and wanted.compute_capability == found.compute_capability
    return same and close and wanted.count in (1, machine.count)
