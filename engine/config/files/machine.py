"""What this process finds around it: working directory, versions of installed packages, and the device for a new
profile."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import requires as metadata_requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.config.files.cgroups import host_memory_bytes, memory_limit_bytes
from engine.config.files.text import quoted, visible
from engine.errors import UsageError


def working_directory() -> Path:
    """Absolute; if the directory was deleted, the path in $PWD, else the root."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        named = Path(os.environ.get("PWD", os.sep))
        return named if named.is_absolute() else Path(os.sep)


def path_of(text: str) -> Path:
    """The path that somebody wrote, with ~ replaced. Raises UsageError for what no file can be called: too long, with
    a NUL, in the home of a user who does not exist, through links in a ring."""
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (ValueError, RuntimeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{quoted(text)} is not a path: {reason}", fix="correct it") from error
    return path


@cache
def installed(package: str) -> str:
    """Version of an installed package; empty where it is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    # Its property `version` parses all of the metadata, the package's whole description included.
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    return metadata.partition("\nVersion: ")[2].partition("\n")[0].strip()


def install_command(extra: str, names: Sequence[str]) -> str:
    """The command that installs packages of Tunedeck's extra, in the versions that it asks for, without Tunedeck's own
    name, which no package index needs to know."""
    wanted = dict.fromkeys(names, "")
    try:
        known = metadata_requires("tunedeck") or []
    except PackageNotFoundError:  # a copy of the files that was not installed
        known = []
    for line in known:
        requirement, _, condition = line.partition(";")
        name = re.split(r"[<>=!~ \[(]", requirement.strip())[0]
        if name in wanted and f'"{extra}"' in condition.replace("'", '"'):
            wanted[name] = requirement.strip().removeprefix(name).strip(" ()")
    return install_packages(*(name + version for name, version in wanted.items()))


def install_packages(*requirements: str, upgrade: bool = False) -> str:
    """The command that installs packages beside this copy of Tunedeck, by what made its environment: pip, pipx, or uv,
    which leaves pip out."""
    prefix = Path(sys.prefix)
    options = ["--upgrade"] if upgrade else []
    if (prefix / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "runpip", prefix.name, "install", *options, *requirements])
    try:
        settings = (prefix / "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError:
        settings = []
    if find_spec("pip") is not None or not any(line.startswith("uv = ") for line in settings):
        return shlex.join(["pip", "install", *options, *requirements])
    # uvx makes an environment in its cache for each set of packages, and moves it there when it is complete.
    if "relocatable = true" not in settings or (prefix / "uv-receipt.toml").is_file():
        python = str(prefix / "bin" / "python")
        return shlex.join(["uv", "pip", "install", "--python", python, *options, *requirements])
    added = [word for requirement in requirements for word in ("--with", requirement)]
    return f"{shlex.join(['uvx', *added, 'tunedeck'])}, in place of uvx tunedeck"


def older(found: str, release: str) -> bool:
    """Whether the version `found` is older than `release` ("major.minor"); False if `found` is empty."""
    return bool(found) and _release(found) < _release(release)


def _release(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


CUDA_RESERVE_GIB = 1.0
"""Memory of the CUDA context and libraries, rounded up."""


def detect_device() -> tuple[dict[str, Any], str, str]:
    """A profile's [device] table, its title and its notes, for the first GPU that NVML finds, else for the CPU."""
    return _detect_gpu() or _detect_cpu()


def count_devices() -> int:
    """The number of GPUs that NVML finds; 1, for the CPU, if it finds none."""
    if not _has_nvml():
        return 1
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 1
    try:
        return max(1, int(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _has_nvml() -> bool:
    """Checked first, because importing pynvml takes as long as the rest of the detection."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _detect_gpu() -> tuple[dict[str, Any], str, str] | None:
    if not _has_nvml():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        return _gpu_facts(pynvml, count) if count else None
    finally:
        pynvml.nvmlShutdown()


def _gpu_facts(pynvml: Any, count: int) -> tuple[dict[str, Any], str, str]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    total_bytes, offered_bytes = _memory(pynvml, handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name, driver = visible(pynvml.nvmlDeviceGetName(handle)), visible(pynvml.nvmlSystemGetDriverVersion())
    device = {
        "kind": "cuda",
        "memory_gib": offered_bytes * 100 // 2**30 / 100,
        "reserve_gib": CUDA_RESERVE_GIB,
        "host_memory_gib": host_memory_bytes() * 100 // 2**30 / 100,
        "compute_capability": float(f"{major}.{minor}"),
        "allocator": "expandable_segments:True",
    }
    others = f" This machine has {count}: raise device.count to use them." if count > 1 else ""
    kept = (total_bytes - offered_bytes) >> 20
    notes = f"memory_gib: NVML's total of {total_bytes >> 20} MiB minus {kept} MiB used by driver {driver}.{others}"
    return device, name, notes


def _memory(pynvml: Any, handle: Any) -> tuple[int, int]:
    """NVML's total bytes, and those that programs can use: the driver reserves some hundreds of MiB, which drivers
    before 510 do not report."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        total_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return total_bytes, total_bytes
    return int(memory.total), int(memory.total - memory.reserved)


def _detect_cpu() -> tuple[dict[str, Any], str, str]:
    memory_gib = host_memory_bytes() * 100 // 2**30 / 100
    device = {
        "kind": "cpu",
        "memory_gib": memory_gib,
        "reserve_gib": round(memory_gib * 0.2, 2),
        "host_memory_gib": memory_gib,
    }
    limit = memory_limit_bytes()
    total = "the host's total" if limit != host_memory_bytes() else "the limit of this container (control group)"
    notes = f"No NVIDIA driver was found. memory_gib: {total}; a fifth is left for everything else on the machine."
    return device, f"This machine's CPU, {os.cpu_count()} cores", notes
