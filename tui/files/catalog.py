"""The profiles and recipes that can be chosen, and for each profile whether it matches this machine.

Where no profile file describes this machine, there is an entry for a profile of the detected device. Its file is
written into the state folder when it is chosen (`write_detected_profile`), so that the command on the screen can name
it.

Try: `python -c "from tui.files.catalog import *; print(*profile_entries(read_machine()), sep='\\n')"`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.files.find import SpecFile, SpecKind, find_spec_file, list_spec_files
from engine.config.files.machine import count_devices, detect_device
from engine.config.files.trust import state_folder
from engine.config.files.write import write_new_file
from engine.config.load import load_spec_file
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Device, Profile
from engine.errors import TunedeckError

SAME_MEMORY = 0.01
"""GPUs whose memory differs by less than this share are the same product: drivers report some MiB more or less."""


@dataclass(frozen=True)
class Machine:
    """What was detected on this machine: its first device, the number of devices, and the title and notes of the
    profile that is offered for them."""

    device: Device
    count: int
    title: str
    notes: str

    @property
    def stem(self) -> str:
        """The file name (without .toml) of the detected profile: the device's name, reduced to the characters that are
        allowed in a profile's name."""
        if self.device.kind == "cpu":
            return "this-cpu"
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:60] or "this-gpu"


@dataclass(frozen=True)
class FileEntry:
    """A profile or recipe that can be chosen on the Launch screen. `argument` is the name or path that -p or -r
    takes."""

    argument: str
    title: str
    origin: str
    path: Path
    problem: str = ""
    """Why the file cannot be used, or why the profile does not match this machine; else empty."""
    broken: bool = False
    """Whether the file cannot be used."""
    is_this_machine: bool = False
    """Whether it is a profile that describes this machine."""
    made_for: str = ""
    """The profile that a recipe names as the one it is made for; empty if it names none."""


def read_machine() -> Machine:
    """Detect this machine's devices; without a GPU, the CPU."""
    table, title, notes = detect_device()
    return Machine(Device.model_validate(table), count_devices(), title, notes)


def _detected_path(machine: Machine) -> Path:
    return state_folder() / "machine" / f"{machine.stem}.toml"


def write_detected_profile(machine: Machine) -> str:
    """Write the profile of this machine into the state folder. Returns the reason if it cannot be written, else an
    empty text."""
    from engine.config.files.write import new_profile  # slow to import: not before the first paint

    device = machine.device.model_dump(exclude_none=True)
    text = new_profile(None, device, title=machine.title, notes=machine.notes).encode()
    target = _detected_path(machine)
    try:
        if not target.is_file() or target.read_bytes() != text:
            write_new_file(target, text, force=True)
    except TunedeckError as error:
        return error.found
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def profile_entries(machine: Machine) -> list[FileEntry]:
    """Every profile: first the one of this machine, then profiles that this machine can run, then profiles that do not
    match this machine, last the broken files."""
    entries = [_entry("profile", located, machine) for located in list_spec_files("profile")]
    if not any(entry.is_this_machine for entry in entries):
        entries.append(_detected_entry(machine))
    return sorted(entries, key=lambda entry: (not entry.is_this_machine, entry.broken, bool(entry.problem)))


def recipe_entries() -> list[FileEntry]:
    """Every recipe: first the recipes of the project and the user, then the shipped ones, last the broken files."""
    entries = [_entry("recipe", located, None) for located in list_spec_files("recipe")]
    return sorted(entries, key=lambda entry: (entry.broken, entry.origin == "shipped"))


def find_entry(kind: SpecKind, argument: str, machine: Machine) -> FileEntry:
    """Return the entry of a profile or recipe, by a name or path that `profile_entries` and `recipe_entries` do not
    list; with `broken` set if no file is found."""
    try:
        located = find_spec_file(kind, argument)
    except TunedeckError as error:
        return FileEntry(argument, "", "path", Path(argument), error.found, broken=True)
    return replace(_entry(kind, located, machine if kind == "profile" else None), argument=argument)


def _detected_entry(machine: Machine) -> FileEntry:
    path = _detected_path(machine)
    return FileEntry(str(path), machine.title, "detected", path, is_this_machine=True)


def _entry(kind: SpecKind, located: SpecFile, machine: Machine | None) -> FileEntry:
    try:
        table = load_spec_file(kind, located)
    except TunedeckError as error:
        return FileEntry(located.name, "", located.origin, located.path, error.found.splitlines()[0], broken=True)
    title = table.title if isinstance(table, (Profile, Recipe)) else ""
    if machine is None or not isinstance(table, Profile):
        made_for = table.profile or "" if isinstance(table, Recipe) else ""
        return FileEntry(located.name, title, located.origin, located.path, made_for=made_for)
    problem, same = mismatch(table, machine), _is_this_machine(table, machine)
    return FileEntry(located.name, title, located.origin, located.path, problem, is_this_machine=same)


def mismatch(profile: Profile, machine: Machine) -> str:
    """Why this machine cannot run the profile; empty if it can. A larger GPU can run the profile of a smaller one."""
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
        return f"this machine has compute capability {found.compute_capability}, not {wanted.compute_capability}"
    return ""


def _is_this_machine(profile: Profile, machine: Machine) -> bool:
    wanted, found = profile.device, machine.device
    close = abs(wanted.memory_gib - found.memory_gib) <= SAME_MEMORY * found.memory_gib
    same = wanted.kind == found.kind and wanted.compute_capability == found.compute_capability
    return same and close and wanted.count in (1, machine.count)
