"""Remembers proofs that passed: a small text file in the cache folder for each, named by what the outcome depends on.

A name is a hash of the proof's own facts, the device, its driver, the versions of the packages that compute, and the
engine's source files that the proofs are about. If any of these changes, the proof is run again.

Try: `ls ~/.cache/tunedeck/proofs`
"""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.data.cache import hash_text
from engine.device.base import Device
from engine.device.nvml import driver_version
from engine.spec.files.user_folders import cache_folder
from engine.train.proofs.record import Proof, ProofResult
from engine.train.setup import TrainingSetup

PACKAGES = (
    "tunedeck", "torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "triton", "flash-attn",
    "flash-attn-3", "flash-attn-4",
)  # fmt: skip
ROOMS = ("model", "device", "train/step", "train/proofs")


def key(proof: Proof, setup: TrainingSetup) -> str | None:
    """The name under which the outcome of a proof is remembered; None for a proof that is never remembered, because its
    outcome depends on the process."""
    if proof.facts is None:
        return None
    return hash_text(proof.name, *proof.facts(setup), *_of_device(setup.context.device), *_of_code())


def has(name: str) -> bool:
    """Whether a proof passed before under this name."""
    return _file(name).is_file()


def remember(name: str, result: ProofResult) -> None:
    """Remember a proof that passed. If the cache folder cannot be written, the proof is run again next time."""
    try:
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        _file(name).write_text(f"{result.name}: {result.detail}\n", "utf-8")
    except OSError:
        return


def _file(name: str) -> Path:
    return cache_folder() / "proofs" / f"{name}.txt"


def _of_device(device: Device) -> tuple[str, ...]:
    # The metered device computes as the CPU does: its cap is proved apart.
    computes = device.name if device.kind == "cuda" else platform.processor() + torch.backends.cpu.get_cpu_capability()
    return computes, str(driver_version() if device.kind == "cuda" else ""), str(torch.get_num_threads())


@lru_cache(maxsize=1)
def _of_code() -> tuple[str, ...]:
    """Texts that change with the code: the versions of PACKAGES, and name, size in bytes and time of change of every
    Python file in the folders ROOMS of the engine."""
    versions = [f"{package} {_version(package)}" for package in PACKAGES]
    engine = Path(__file__).resolve().parents[2]
    files = sorted(file for room in ROOMS for file in (engine / room).glob("*.py"))
    return (*versions, *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
