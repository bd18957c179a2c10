"""What a proof is, and the record of its outcome: `engine.verify.verify` runs them.

A proof runs what a run will use on a few small tensors of the run's own dtypes and shapes, and compares it with a
reference that is slow and plain. It must not change the run: no weights, no random numbers, no memory kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config.schema.run import RunSpec
from engine.train.step.context import StepContext


class ProvedRun(Protocol):
    """What proofs are about; `TrainingSetup` is one."""

    spec: RunSpec
    context: StepContext


class DisprovedError(Exception):
    """What the run would use (a kernel, an allocator, an optimizer) gives wrong results. The message says what differs,
    and by how much."""


class UndecidedError(Exception):
    """What was to be proved could not be tried on this rank, because of another rank."""


class Proof(NamedTuple):
    """One proof of the tables in `engine.verify.verify`."""

    name: str
    """What is proved, as the event `proof` names it."""
    prove: Callable[[ProvedRun], str]
    """Returns what was shown, in a few words. Raises DisprovedError, or any error of what is tried."""
    fall_back: Callable[[ProvedRun], str]
    """Called on every rank if the proof failed on one: replaces what failed by its reference, or keeps the run away
    from it. Returns what the run does instead, in a few words. Raises EnvironmentProblem if nothing can replace it."""
    applies: Callable[[ProvedRun], bool] = lambda run: True
    """Whether the run uses what is proved."""
    facts: Callable[[ProvedRun], list[str]] | None = None
    """What the outcome depends on besides device and versions, as texts. None for a proof that is never taken from an
    earlier run, because it depends on the process."""
    votes: bool = False
    """Whether `prove` votes with the group of all ranks before each of its collectives and exchanges, so that an error
    on one rank ends it on all. The error counts on that rank; the proof is undecided on the others."""


@dataclass(frozen=True)
class ProofResult:
    """The outcome of one proof on one rank, or on all of them."""

    name: str
    passed: bool | None
    """None if it could not be tried, for want of memory for example, which proves nothing."""
    detail: str
    """What was shown, or what differs."""
    fallback: str = ""
    """What the run does instead, if the proof failed."""
    seconds: float = 0.0
    cached: bool = False
    """Whether the outcome is that of an earlier run with the same device, versions and shapes."""


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error of a kernel that computes in `dtype`: two units of rounding of its results, and 2e-5
    for fp32, whose sums are taken in another order."""
    return max(2 * torch.finfo(dtype).eps, 2e-5)


def require_close(what: str, found: Tensor | None, expected: Tensor, limit: float) -> float:
    """Return the relative error |found - expected| / |expected| (Frobenius norms). Raises DisprovedError if it is above
    `limit` or not a number, or if `found` is None; the message names the tensor as `what`."""
    if found is None:
        raise DisprovedError(f"{what} is missing")
    exact = expected.detach().double()
    error = float((found.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))
    if not error <= limit:
        raise DisprovedError(f"{what} is off by {error:.1e}; rounding explains at most {limit:.1e}")
    return error


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float, where: str = "") -> float:
    """The largest relative error of the `expected` tensors; `where` follows their names in messages. Raises
    DisprovedError as `require_close`."""
    return max(require_close(name + where, found.get(name), tensor, limit) for name, tensor in expected.items())


def require_repeats(compute: Callable[[], dict[str, Tensor]], of: str) -> None:
    """Call `compute` twice. Raises DisprovedError if a tensor `of` it differs in a bit."""
    first, second = compute(), compute()
    for name, one in first.items():
        if not torch.equal(one, second[name]):
            raise DisprovedError(f"{of}{name} differs between two runs on the same input")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, run: ProvedRun, seed: int) -> Tensor:
    """A tensor of standard normal numbers on the run's device, the same at each call with this `seed`. The numbers are
    drawn on the host, so the state of the device's generators does not change."""
    device = run.context.device
    generator = torch.Generator().manual_seed(seed)
    with device.host_region():
        values = torch.randn(shape, generator=generator).to(dtype)
    return device.upload(values)
