"""Proof: a step whose weights are spread over the ranks gives the gradients and weights of torch's own communication;
in full fine-tuning also those of one rank that computes all micro-batches alone.

Several steps are taken, so that weights that were not gathered again after an update show.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.errors import EnvironmentProblem
from engine.train.proofs.ranks.small_decoder import SmallDecoder, batch, mesh_of, shard
from engine.train.proofs.record import require_close
from engine.train.setup import TrainingSetup

STEPS = 2
RATE = 0.05
"""Learning rate, high enough that weights of the step before are far from those after it."""
LIMIT = 1e-3
"""Largest relative error of fp32 results after two steps. Rounding was 7e-5 at most on 2 CPU ranks; a wrong scale, or
weights of the step before, are off by a tenth and more."""


class Way(NamedTuple):
    """What is trained and how much of it: LoRA or all weights; whether gathered weights are dropped after use (ZeRO-3)
    or kept (ZeRO-2); number of layers, and of micro-batches in a step."""

    lora: bool
    drops_weights: bool
    layers: int = 4
    micro_batches: int = 2

    @property
    def text(self) -> str:
        """The way in words."""
        return f"{'LoRA' if self.lora else 'full'} in ZeRO-{3 if self.drops_weights else 2}"


def prove(setup: TrainingSetup) -> str:
    """Take steps of full fine-tuning with ZeRO-3 and of LoRA with ZeRO-2. All ranks call this; it votes. Returns what
    was shown, in a few words. Raises DisprovedError if a gradient or a weight of this rank's part differs by more than
    rounding from what torch's own communication gives, or for full fine-tuning from what one rank alone
    computes."""
    full, lora = Way(lora=False, drops_weights=True), Way(lora=True, drops_weights=False)
    of_full = _worst_error(setup, full, {"torch's": _with_torch, "one rank's": _alone})
    worst = max(of_full, _worst_error(setup, lora, {"torch's": _with_torch}))
    return f"{_steps_of([full, lora])} are within {worst:.1e} of torch's own communication; full also of one rank alone"


def prove_in_brief(setup: TrainingSetup) -> str:
    """As `prove`, with the run's own way on two layers, and compared with torch's own communication alone."""
    lora, parallel = setup.context.loaded.kind == "adapter", setup.spec.profile.parallel
    way = Way(lora, drops_weights=parallel.shard == "parameters", layers=2, micro_batches=1)
    worst = _worst_error(setup, way, {"torch's": _with_torch})
    return f"{_steps_of([way])} are within {worst:.1e} of torch's own communication"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because sharded training would learn something else."""
    raise EnvironmentProblem(
        "a step of sharded weights gives wrong results on this machine",
        expected="those of torch's own communication, up to rounding",
        fix="use parallel.strategy=replicated where a device holds the model; see tunedeck doctor --gpus",
    )


def _steps_of(ways: list[Way]) -> str:
    return f"{STEPS} steps of {ways[0].layers} sharded layers ({', '.join(way.text for way in ways)})"


def _worst_error(
    setup: TrainingSetup, way: Way, references: dict[str, Callable[[TrainingSetup, Way], dict[str, Tensor]]]
) -> float:
    """The largest relative error of gradients and weights of this rank's parts, compared with what each of `references`
    computes. Raises DisprovedError if one is above LIMIT."""
    ours, errors = _with_votes(setup, way), [0.0]
    for name, compute in references.items():
        setup.context.ranks.voted_group().ready()
        expected = compute(setup, way)
        what = f"in {way.text}, compared with {name},"
        errors += [require_close(f"{each} {what}", ours.get(each), expected[each], LIMIT) for each in expected]
    return max(errors)


def _with_votes(setup: TrainingSetup, way: Way) -> dict[str, Tensor]:
    """Take the steps as a run does; returns this rank's parts of all gradients and of the last weights, by name."""
    decoder = SmallDecoder(setup, torch.float32, layers=way.layers, lora=way.lora)
    sharded = shard(setup, decoder, drops_weights=way.drops_weights)

    def gradients() -> dict[str, tuple[Tensor, Tensor]]:
        sharded.sync_gradients()
        parts = sharded.local_parameters()
        return {name: (part, part.grad) for name, part in parts.items() if part.grad is not None}

    return _steps(setup, way, decoder, gradients, sharded.drop_gradients)


def _with_torch(setup: TrainingSetup, way: Way) -> dict[str, Tensor]:
    """As `_with_votes`, with torch's own collectives, which average gradients over ranks."""
    decoder = SmallDecoder(setup, torch.float32, layers=way.layers, lora=way.lora)
    mesh, policy = mesh_of(setup), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*decoder.layers, decoder.embedding, decoder.head, decoder):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=way.drops_weights)
    learning = [(name, parameter) for name, parameter in decoder.named_parameters() if parameter.requires_grad]

    def gradients() -> dict[str, tuple[Tensor, Tensor]]:
        size = setup.context.ranks.size
        return {name: (_local(p).detach(), _local(p.grad) * size) for name, p in learning if p.grad is not None}

    return _steps(setup, way, decoder, gradients, decoder.zero_grad)


def _alone(setup: TrainingSetup, way: Way) -> dict[str, Tensor]:
    """Take the steps with the micro-batches of all ranks and whole weights; returns this rank's parts of the results,
    as `_with_votes` does."""
    ranks, decoder = setup.context.ranks, SmallDecoder(setup, torch.float32, layers=way.layers, lora=way.lora)
    learning = [(name, parameter) for name, parameter in decoder.named_parameters() if parameter.requires_grad]

    def gradients() -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (p.detach(), p.grad) for name, p in learning if p.grad is not None}

    wholes = _steps(setup, way, decoder, gradients, decoder.zero_grad, range(ranks.size))
    return {name: whole[_rows(len(whole), ranks.rank, ranks.size)] for name, whole in wholes.items()}


def _steps(
    setup: TrainingSetup,
    way: Way,
    decoder: SmallDecoder,
    gradients: Callable[[], dict[str, tuple[Tensor, Tensor]]],
    drop_gradients: Callable[[], None],
    of_ranks: range | None = None,
) -> dict[str, Tensor]:
    """Take all steps with the micro-batches of this rank, or of the ranks `of_ranks`; returns copies of the gradients
    of each step, and of the weights at the end, by name.

    `gradients` returns (weight, gradient) by name after the backward passes of a step, `drop_gradients` ends the step.
    """
    results: dict[str, Tensor] = {}
    for step in range(STEPS):
        with torch.enable_grad():
            for number in _micro_batches(setup, way, step, of_ranks):
                decoder(batch(setup, number)).backward()
        with torch.no_grad():
            for name, (weight, gradient) in gradients().items():
                results[f"the gradient of {name} in step {step + 1}"] = gradient.detach().clone()
                weight -= RATE * gradient
                results[f"{name} after the last step"] = weight
        drop_gradients()
    return {name: result.detach().clone() for name, result in results.items()}


def _micro_batches(setup: TrainingSetup, way: Way, step: int, of_ranks: range | None) -> Iterator[int]:
    """Numbers of the micro-batches of a step: each of this rank, or of `of_ranks`, has other samples."""
    ranks = setup.context.ranks
    for rank in of_ranks or (ranks.rank,):
        for place in range(way.micro_batches):
            yield (step * ranks.size + rank) * way.micro_batches + place


def _rows(count: int, rank: int, size: int) -> slice:
    """The rows of a parameter of `count` rows that belong to a rank: torch gives each as many rows, the last fewer."""
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
