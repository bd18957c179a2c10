"""Proof: attention of sequences that all ranks share gives the outputs and gradients of whole sequences.

Shapes: B rows, H query heads, K key heads, S positions of a rank, T positions of all, D features.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.distributed.sequence_parallel import SequenceGroup, join_sequence_group, to_heads, to_positions
from engine.errors import EnvironmentProblem
from engine.train.proofs.record import drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

ROWS, POSITIONS, FEATURES = 2, 5, 8
NAMES = ("queries", "keys", "values")


def prove(setup: TrainingSetup) -> str:
    """Compute causal attention with each rank's positions, and of whole sequences on each rank alone. All ranks call
    this; it votes. Returns what was shown, in a few words. Raises DisprovedError if output or gradients of this rank's
    positions differ by more than rounding."""
    ranks = setup.context.ranks
    group = join_sequence_group(ranks, ranks.size)
    shared, whole = _shared(setup, group), _whole(setup, group.size)
    limit = tolerance(torch.float32)
    worst = max(
        require_close(f"{name} of shared sequences", shared[name], _here(whole[name], group.place), limit)
        for name in whole
    )
    return f"attention over sequences that {group.size} ranks share is within {worst:.1e} of whole ones, gradients too"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem if the run shares sequences, which ends it; returns what it does otherwise, in a few
    words."""
    if setup.spec.profile.parallel.sequence == 1:
        return "nothing, because this run does not share sequences"
    raise EnvironmentProblem(
        "attention of shared sequences is wrong on this machine",
        expected="the results of whole sequences, up to rounding",
        fix="set parallel.sequence=1; see tunedeck doctor --gpus",
    )


def _shared(setup: TrainingSetup, group: SequenceGroup) -> dict[str, Tensor]:
    """Output [B, H, S, D] and gradients of this rank's positions, by name."""
    given = [_here(tensor, group.place).clone().requires_grad_() for tensor in _inputs(setup, group.size)]
    with torch.enable_grad():
        output = to_positions(group, _attend(*to_heads(group, given)))
        return _results(setup, output, given, _here(_upstream(setup, group.size), group.place))


def _whole(setup: TrainingSetup, size: int) -> dict[str, Tensor]:
    """Output [B, H, T, D] and gradients of all positions, by name."""
    given = [tensor.requires_grad_() for tensor in _inputs(setup, size)]
    with torch.enable_grad():
        return _results(setup, _attend(*given), given, _upstream(setup, size))


def _results(setup: TrainingSetup, output: Tensor, given: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(output, given, upstream)
    named = {f"the gradient of {name}": each for name, each in zip(NAMES, gradients, strict=True)}
    return {"the output": output.detach(), **named}


def _attend(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query_BHTD, key_BKTD, value_BKTD, is_causal=True, enable_gqa=True)


def _inputs(setup: TrainingSetup, size: int) -> list[Tensor]:
    """Queries of two heads for each rank; keys and values of fewer heads than ranks, which several ranks use."""
    heads = (2 * size, max(1, size // 2), max(1, size // 2))
    shapes = [(ROWS, count, POSITIONS * size, FEATURES) for count in heads]
    return [drawn(shape, torch.float32, setup, 200 + number) for number, shape in enumerate(shapes)]


def _upstream(setup: TrainingSetup, size: int) -> Tensor:
    return drawn((ROWS, 2 * size, POSITIONS * size, FEATURES), torch.float32, setup, 203)


def _here(tensor_BHTD: Tensor, place: int) -> Tensor:
    """The positions of the rank at `place`."""
    return tensor_BHTD.detach()[:, :, place * POSITIONS : (place + 1) * POSITIONS]
