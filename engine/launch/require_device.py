"""Checks that the GPUs of a profile exist on this machine, before a run directory is created.

Reads the driver's library and the version of torch, and imports no torch. The engine checks again when it opens the
device, and also whether the device is free.

Try: `tunedeck train -p 24gb -r demo` on a machine without a GPU
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import os

from engine.errors import EnvironmentProblem, SpecError
from engine.spec.files.find import list_spec_files
from engine.spec.load import load_spec_file
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""Files of drivers that torch can use although NVML does not list their GPUs: Jetson, WSL, ROCm."""


def require_device(spec: RunSpec) -> None:
    """Raise EnvironmentProblem if the profile asks for GPUs, and this machine has too few, or torch cannot use any."""
    wanted, name = spec.profile.device.count, spec.profile.name
    if spec.profile.device.kind != "cuda":
        return
    found = count_gpus()
    if found is not None and found < wanted:
        needs = "a GPU" if wanted == 1 else f"{wanted} GPUs"
        here = "finds none" if not found else f"has {found}"
        raise EnvironmentProblem(f"profile {name!r} is for {needs}, and this machine {here}", fix=_profile_for_here())
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu"):
        raise EnvironmentProblem(
            f"profile {name!r} is for a GPU, and torch {torch}, which is installed here, was built without CUDA",
            fix="install a build of torch with CUDA: https://pytorch.org/get-started",
        )


def count_gpus() -> int | None:
    """The number of GPUs that a run may use; None if it is not known without torch, because CUDA_VISIBLE_DEVICES or a
    driver other than NVIDIA's usual one decides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible.strip() in ("", "-1") else None
    count = _nvml_count()
    return count if count or not any(glob.glob(pattern) for pattern in DEVICE_FILES) else None


def _nvml_count() -> int:
    try:
        # Tried before pynvml is imported, which takes as long as everything else here.
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _profile_for_here() -> str:
    """Return the advice, for an error's fix, how to get a profile that this machine can run: the name of one of the
    user's own profiles for the CPU, else the command that writes one."""
    names = [file.name for file in list_spec_files("profile")]
    for file in list_spec_files("profile"):
        try:
            profile = load_spec_file("profile", file) if file.origin != "shipped" else None
        except SpecError:
            continue
        if isinstance(profile, Profile) and profile.device.kind == "cpu":
            return f"use -p {file.name}, which is for a CPU"
    name = next(name for name in ("here", *(f"here-{number}" for number in range(2, 99))) if name not in names)
    return f"tunedeck profiles new {name} --detect, which describes this machine; then use -p {name}"
