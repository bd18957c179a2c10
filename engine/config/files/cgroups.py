"""Memory limits of the control groups (version 1 and 2) that this process is in, as containers and schedulers set them,
and how often the kernel killed a process there for memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")

LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
"""Files of a group that limit its memory. Above memory.high the kernel does not kill, but slows to a crawl."""

USAGE = {1: ("memory.usage_in_bytes", "total_inactive_file"), 2: ("memory.current", "inactive_file")}
"""The file with a group's use, and the key in its memory.stat of the file cache that the kernel gives back first."""

KILLS = {1: "memory.oom_control", 2: "memory.events"}
"""Files with a line `oom_kill N`."""


def memory_limit_bytes(proc: Path = PROC) -> int | None:
    """The smallest limit of this process's groups and all their parents; None without one."""
    return min((limit for version, group in _groups(proc) if (limit := _limit(version, group))), default=None)


def free_memory_bytes(proc: Path = PROC) -> int | None:
    """The smallest difference between a group's limit and what it uses without file cache; None without a limit."""
    free = []
    for version, group in _groups(proc):
        limit, (name, cache) = _limit(version, group), USAGE[version]
        if limit is not None and (used := _number(group / name)) is not None:
            free.append(max(0, limit - used + _field(group / "memory.stat", cache)))
    return min(free, default=None)


def oom_kills(proc: Path = PROC) -> dict[str, int]:
    """Processes that the kernel has killed for memory, by group, so far. Empty where it does not say."""
    found = {}
    for version, group in _groups(proc):
        path = group / KILLS[version]
        if path.is_file():
            found[str(group)] = _field(path, "oom_kill")
    return found


def host_memory_bytes(proc: Path = PROC) -> int:
    """What this process may use: the machine's memory, or less in a group with a limit."""
    return memory_limit_bytes(proc) or _physical_bytes()


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit(version: int, group: Path) -> int | None:
    """None where it is not below the machine's memory: version 1 writes a huge number for no limit."""
    found = min((limit for name in LIMITS[version] if (limit := _number(group / name)) is not None), default=None)
    return found if found is not None and found < _physical_bytes() else None


def _groups(proc: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's memory group and each of its parents that can be seen here."""
    try:
        own, mounts = (proc / "cgroup").read_text(), (proc / "mountinfo").read_text()
    except OSError:
        return  # no Linux
    names = {}
    for line in own.splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            names[2 if number == "0" else 1] = name
    for line in mounts.splitlines():
        version = 2 if " - cgroup2 " in line else 1 if re.search(r" - cgroup .*\bmemory\b", line) else 0
        if version not in names:
            continue
        root, place = (_unescaped(text) for text in line.split(" ")[3:5])
        yield from ((version, folder) for folder in _upwards(names[version], root, Path(place)))


def _upwards(name: str, root: str, place: Path) -> Iterator[Path]:
    """The folder of the group `name`, then its parents up to the mount `place`, which shows the groups below `root`.
    In a container the name may lie outside of what is mounted; the mount is then the container's own group."""
    inside = os.path.relpath(name, root)
    folder = place if inside.startswith("..") else place / inside
    yield folder
    while folder != place:
        folder = folder.parent
        yield folder


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text)


def _number(path: Path) -> int | None:
    """None for a file that is missing, or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, key: str) -> int:
    """N of the line `key N`; 0 without one."""
    try:
        found = re.search(rf"^{key} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
