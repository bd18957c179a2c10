"""Runs the proofs of a run, falls back where one fails, and writes a line of the journal for each.

All ranks fall back together: what fails on one is used by none. A proof that passed is remembered in the cache folder
under the device, the versions and the shapes it was made for, and is not repeated there. A proof that cannot be tried
for want of memory counts as neither passed nor failed, and causes no fallback.

Try: `tunedeck doctor --gpus -p demo`
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch

from engine.device.base import Device
from engine.device.oom import classify, clear_frames, flush_autograd, is_sticky
from engine.distributed.host_gather import LostRankError
from engine.errors import EnvironmentProblem
from engine.train.monitor.journal import Journal
from engine.train.proofs import remembered
from engine.train.proofs.record import DisprovedError, Proof, ProofResult, UndecidedError
from engine.train.proofs.table import PROOFS
from engine.train.setup import TrainingSetup


def prove(
    setup: TrainingSetup, journal: Journal, *, proofs: Sequence[Proof] = PROOFS, afresh: bool = False
) -> list[ProofResult]:
    """Run the proofs of what the run will use, fall back where one fails, and write the event `proof` for each; returns
    the outcomes. All ranks call this before the first step.

    With `afresh`, outcomes of earlier runs are not used.

    Raises:
        EnvironmentProblem: a proof left the device unusable, so that nothing can be proved or trained in this process;
            or nothing can replace what failed.
        LostRankError: another rank could not go on.
    """
    ranks, device = setup.context.ranks, setup.context.device
    used = [proof for proof in proofs if proof.applies(setup)]
    keys = {proof.name: remembered.key(proof, setup) for proof in used}
    known = set() if afresh else {name for name, key in keys.items() if key and remembered.has(key)}
    known = set.intersection(*(set(names) for names in ranks.all_gather_object(sorted(known))))
    fatal: list[EnvironmentProblem] = []
    with _undisturbed(device):
        own = [_earlier(proof) if proof.name in known else _tried(proof, setup) for proof in used]
        gathered = ranks.all_gather_object([asdict(result) for result in own])
        results = []
        for proof, outcomes in zip(used, zip(*gathered, strict=True), strict=True):
            result = _of_all_ranks([ProofResult(**outcome) for outcome in outcomes])
            if result.passed is False:
                result = replace(result, fallback=_fallen_back(proof, setup, fatal))
            results.append(result)
    for result in results:
        key = keys[result.name]
        if result.passed and key and not result.cached:
            remembered.remember(key, result)
        journal.write("proof", **asdict(result))
    if fatal:
        raise fatal[0]
    return results


def _fallen_back(proof: Proof, setup: TrainingSetup, fatal: list[EnvironmentProblem]) -> str:
    """Fall back from what failed; returns what the run does instead, in a few words. If nothing can replace it, the
    error that ends the run is added to `fatal`: the outcomes of all proofs are written first."""
    try:
        return proof.fall_back(setup)
    except EnvironmentProblem as problem:
        fatal.append(problem)
        return f"it ends; {problem.fix}"


@contextmanager
def _undisturbed(device: Device) -> Iterator[None]:
    """Context manager: afterwards random states are as before, and memory that the proofs cached is released."""
    cuda = [device.torch_device] if device.torch_device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        yield
    device.release_cached()
    device.reset_peak()


def _earlier(proof: Proof) -> ProofResult:
    return ProofResult(proof.name, True, "proved before on this machine with the same versions", cached=True)


def _tried(proof: Proof, setup: TrainingSetup) -> ProofResult:
    """Run one proof on this rank; returns the outcome. With want of memory the outcome is undecided (`passed` is None).
    """
    began = time.perf_counter()
    passed, detail = _outcome(proof, setup)
    # Outside the handler, whose exception would keep tensors alive.
    flush_autograd()
    if proof.votes:
        # Modules in shards are collected late, but what is allocated is compared by the proofs that follow.
        setup.context.device.release_cached()
    return ProofResult(proof.name, passed, detail, seconds=round(time.perf_counter() - began, 4))


def _outcome(proof: Proof, setup: TrainingSetup) -> tuple[bool | None, str]:
    try:
        detail = _shown(proof, setup)
        setup.context.device.synchronize()
        return True, detail
    except DisprovedError as error:
        clear_frames(error)
        return False, str(error)
    except UndecidedError as error:
        return None, f"could not be tried: {error}"
    except LostRankError:
        raise
    except Exception as error:  # of any kind: a proof shows whether a kernel or driver fails
        clear_frames(error)
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if is_sticky(error):
            raise EnvironmentProblem(
                f"the proof of {proof.name} left the device unusable: {text}",
                expected="what the recipe asks for to work on this device",
                fix='set model.attention = "sdpa" and train.loss = "chunked", or see tunedeck doctor --gpus',
            ) from error
        return (None, f"could not be tried: {text}") if classify(error) else (False, f"{type(error).__name__}: {text}")


def _shown(proof: Proof, setup: TrainingSetup) -> str:
    """Run a proof; returns what it has shown. Raises what it raises, and UndecidedError if it failed on another rank.
    """
    if not proof.votes:
        return proof.prove(setup)
    shown: list[str] = []
    voted_group = setup.context.ranks.voted_group()
    if not voted_group.run_together(lambda: shown.append(proof.prove(setup))):
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
