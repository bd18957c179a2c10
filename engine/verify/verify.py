"""Runs the proofs of a run, falls back where one fails, and writes a line of the journal for each.

All ranks fall back together: what fails on one is used by none. A proof that passed is remembered: a small text file in
the cache folder, named by a hash of the proof's own facts, the device, its driver, the versions of the packages that
compute, and the engine's source files that the proofs are about. A proof that cannot be tried for want of memory counts
as neither passed nor failed, and causes no fallback.

Try: `tunedeck doctor --gpus -p demo`
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.config.files.caches import cache_folder
from engine.data.store import hash_text
from engine.device.base import Device
from engine.device.nvml import driver_version
from engine.device.oom import classify, clear_frames, flush_autograd, is_sticky
from engine.distributed.votes import LostRankError
from engine.errors import EnvironmentProblem
from engine.verify import among_ranks, cudnn, kernels, layers, replaced, sharded, state
from engine.verify.record import DisprovedError, Proof, ProofResult, ProvedRun, UndecidedError

ON_A_DEVICE = (
    state.ALLOCATOR,
    state.OOM_IN_BACKWARD,
    kernels.ATTENTION,
    cudnn.CUDNN,
    kernels.LOSS,
    layers.ADAPTED,
    kernels.DROPOUT,
    layers.NF4,
    state.OPTIMIZER,
    state.COPIED,
    state.HOST_SYNCS,
    kernels.DETERMINISM,
    replaced.EXPERT_ADAPTERS,
    replaced.FUSED,
    replaced.TILED_MLP,
    replaced.COMPILED,
)
"""Later proofs may rest on what earlier ones have shown. Layers that were called under another dispatch mode first, as
when host syncs are counted, are never compiled if they are not compiled last."""
AMONG_RANKS = (
    among_ranks.TRANSFERS,
    among_ranks.COLLECTIVES,
    among_ranks.BANDWIDTH,
    among_ranks.COMMUNICATORS,
    sharded.SHARDED_STEP,
)
PROOFS: tuple[Proof, ...] = (among_ranks.COMMUNICATORS, *ON_A_DEVICE)
"""What a run makes at its start: what it has something to fall back to from."""
DOCTOR_PROOFS: tuple[Proof, ...] = (*AMONG_RANKS, *ON_A_DEVICE)
"""What `tunedeck doctor --gpus` makes with a rank on each device."""
PACKAGES = (
    "tunedeck", "torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "triton", "flash-attn",
    "flash-attn-3", "flash-attn-4",
)  # fmt: skip
FOLDERS = ("model", "device", "train/step", "verify")


class EventSink(Protocol):
    """Where outcomes are written: a run's journal."""

    def write(self, kind: str, **fields: Any) -> object:
        """Append one event."""


def prove(
    run: ProvedRun, journal: EventSink, *, proofs: Sequence[Proof] = PROOFS, afresh: bool = False
) -> list[ProofResult]:
    """Run the proofs of what the run will use, fall back where one fails, and write the event `proof` for each; returns
    the outcomes. All ranks call this before the first step. With `afresh`, outcomes of earlier runs are not used.

    Raises:
        EnvironmentProblem: a proof left the device unusable, so that nothing can be proved or trained in this process;
            or nothing can replace what failed.
        LostRankError: another rank could not go on.
    """
    ranks, device = run.context.ranks, run.context.device
    used = [proof for proof in proofs if proof.applies(run)]
    keys = {proof.name: _key(proof, run) for proof in used}
    known = set() if afresh else {name for name, key in keys.items() if key and _file(key).is_file()}
    known = set.intersection(*(set(names) for names in ranks.all_gather_object(sorted(known))))
    fatal: list[EnvironmentProblem] = []
    with _undisturbed(device):
        own = [_tried(proof, run, known=proof.name in known) for proof in used]
        gathered = ranks.all_gather_object([asdict(result) for result in own])
        results = []
        for proof, outcomes in zip(used, zip(*gathered, strict=True), strict=True):
            result = _of_all_ranks([ProofResult(**outcome) for outcome in outcomes])
            if result.passed is False:
                result = replace(result, fallback=_fallen_back(proof, run, fatal))
            results.append(result)
    for result in results:
        key = keys[result.name]
        if result.passed and key and not result.cached:
            _remember(key, result)
        journal.write("proof", **asdict(result))
    if fatal:
        raise fatal[0]
    return results


def _fallen_back(proof: Proof, run: ProvedRun, fatal: list[EnvironmentProblem]) -> str:
    """Fall back from what failed. If nothing can replace it, the error that ends the run is added to `fatal`: the
    outcomes of all proofs are written first."""
    try:
        return proof.fall_back(run)
    except EnvironmentProblem as problem:
        fatal.append(problem)
        return f"the run ends; {problem.fix}"


@contextmanager
def _undisturbed(device: Device) -> Iterator[None]:
    """Afterwards random states are as before, and memory that the proofs cached is released."""
    cuda = [device.torch_device] if device.torch_device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        yield
    device.release_cached()
    device.reset_peak()


def _tried(proof: Proof, run: ProvedRun, *, known: bool) -> ProofResult:
    if known:
        return ProofResult(proof.name, True, "checked before on this machine with the same versions", cached=True)
    began = time.perf_counter()
    passed, detail = _outcome(proof, run)
    # Outside the handler, whose exception would keep tensors alive.
    flush_autograd()
    if proof.votes:
        # Modules in shards are collected late, but what is allocated is compared by the proofs that follow.
        run.context.device.release_cached()
    return ProofResult(proof.name, passed, detail, seconds=round(time.perf_counter() - began, 4))


def _outcome(proof: Proof, run: ProvedRun) -> tuple[bool | None, str]:
    """(passed, detail) of one proof on this rank; `passed` is None with want of memory."""
    try:
        detail = _shown(proof, run)
        run.context.device.synchronize()
        return True, detail
    except DisprovedError as error:
        clear_frames(error)
        return False, str(error)
    except UndecidedError as error:
        return None, f"could not be checked: {error}"
    except LostRankError:
        raise
    except Exception as error:  # of any kind: a proof shows whether a kernel or driver fails
        clear_frames(error)
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if is_sticky(error):
            raise EnvironmentProblem(
                f"the check of {proof.name} left the device unusable: {text}",
                expected="a device that supports the recipe's settings",
                fix='set model.attention = "sdpa" and train.loss = "chunked", or see tunedeck doctor --gpus',
            ) from error
        return (
            (None, f"could not be checked: {text}") if classify(error) else (False, f"{type(error).__name__}: {text}")
        )


def _shown(proof: Proof, run: ProvedRun) -> str:
    if not proof.votes or run.context.ranks.size == 1:
        return proof.prove(run)
    shown: list[str] = []
    voted_group = run.context.ranks.voted_group()
    if not voted_group.run_together(lambda: shown.append(proof.prove(run))):
        raise UndecidedError("it ended on another rank")
    return shown[0]


def _of_all_ranks(outcomes: Sequence[ProofResult]) -> ProofResult:
    """Combine the outcomes of one proof on all ranks: failed if it failed on one, else undecided (`passed` is None) if
    it could not be tried on one, else passed."""
    for passed in (False, None):
        for rank, outcome in enumerate(outcomes):
            if outcome.passed is passed:
                where = f"rank {rank}: " if len(outcomes) > 1 else ""
                return replace(outcome, detail=where + outcome.detail)
    return outcomes[0]


def _key(proof: Proof, run: ProvedRun) -> str | None:
    """The name under which the outcome of a proof is remembered; None for one that is never remembered."""
    if proof.facts is None:
        return None
    return hash_text(proof.name, *proof.facts(run), *_of_device(run.context.device), *_of_code())


def _remember(key: str, result: ProofResult) -> None:
    # If the cache folder cannot be written, the proof is run again next time.
    with suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        _file(key).write_text(f"{result.name}: {result.detail}\n", "utf-8")


def _file(key: str) -> Path:
    return cache_folder() / "proofs" / f"{key}.txt"


def _of_device(device: Device) -> tuple[str, ...]:
    # The metered device computes as the CPU does: its cap is proved apart.
    computes = device.name if device.kind == "cuda" else platform.processor() + torch.backends.cpu.get_cpu_capability()
    return computes, str(driver_version() if device.kind == "cuda" else ""), str(torch.get_num_threads())


@lru_cache(maxsize=1)
def _of_code() -> tuple[str, ...]:
    """Texts that change with the code: the versions of PACKAGES, and name, size in bytes and time of change of every
    Python file in the folders FOLDERS of the engine."""
    versions = [f"{package} {_version(package)}" for package in PACKAGES]
    engine = Path(__file__).resolve().parents[1]
    files = sorted(file for folder in FOLDERS for file in (engine / folder).glob("*.py"))
    return (*versions, *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
