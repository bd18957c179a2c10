"""Proof: all of the optimizer's state exists before its first step and can be restored: the step repeated is bit-equal.

Roll-back and resume need this. State that an optimizer keeps outside its tensors, such as a step counter that is a
plain int, is neither saved nor restored: then the proof fails.

Try: `pytest tests/train/proofs/test_state.py`
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from engine.train.proofs.record import DisprovedError, drawn
from engine.train.setup import TrainingSetup
from engine.train.step.optimizer import StepGuard, guard_parameters
from engine.train.step.optimizer_state import state_tensors

SHAPES = ((96, 64), (33,))
"""A matrix of more than 4,096 elements, which 8-bit optimizers quantise, and a vector, which they do not."""

Named = list[tuple[str, Parameter]]


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on: the recipe's [train] table and the dtypes of the trained parameters."""
    return [setup.spec.recipe.train.model_dump_json(), str(_dtypes(setup))]


def prove(setup: TrainingSetup) -> str:
    """Take a step on small parameters, restore weights and state, and take the step again. Returns what was shown, in a
    few words. Raises DisprovedError if the two results differ, or if the first step added state."""
    named = _parameters(setup)
    weights = {name: parameter.detach().clone() for name, parameter in named}
    train = setup.spec.recipe.train.model_copy(update={"groups": []})
    guard = guard_parameters(train, named, setup.context.device)
    start = _values(guard, named)
    if any(not torch.equal(value, start[name]) for name, value in weights.items()):
        raise DisprovedError("allocating its state changed weights")
    if any(float(value) for name, value in start.items() if name.endswith("::step")):
        raise DisprovedError("allocating its state advanced the step counters")
    once = _stepped(guard, named, setup)
    _restore(guard, named, start)
    again = _stepped(guard, named, setup)
    _compare(start, once, again)
    return f"{type(guard.optimizer).__name__}: state without a step, the same step twice from restored state"


def fall_back(setup: TrainingSetup) -> str:
    """From now on, undo a failed step of this run by restoring its last checkpoint; returns what the run does instead,
    in a few words."""
    setup.context.guard.distrust()
    return "a step that fails is undone by going back to the last checkpoint"


def _compare(start: dict[str, Tensor], once: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    if start.keys() != once.keys():
        added = sorted(once.keys() - start.keys())
        raise DisprovedError(f"its first step makes more state ({', '.join(added[:3])})")
    for name in start:
        if not torch.equal(once[name], again[name]):
            raise DisprovedError(f"{name} differs when the step is taken again: some state is not restored")
        if "::" not in name and torch.equal(start[name], once[name]):
            raise DisprovedError(f"its step leaves {name} unchanged")


def _parameters(setup: TrainingSetup) -> Named:
    """Small parameters with their names, in each dtype that the run trains; their values are the same at each call."""
    return [
        (f"weight {place} in {dtype}", Parameter(drawn(shape, dtype, setup, 10 + place)))
        for dtype in _dtypes(setup)
        for place, shape in enumerate(SHAPES)
    ]


def _dtypes(setup: TrainingSetup) -> list[torch.dtype]:
    return sorted({parameter.dtype for _, parameter in setup.context.loaded.trainable()}, key=str)


def _values(guard: StepGuard, named: Named) -> dict[str, Tensor]:
    """Copies of all weights and of all optimizer state that checkpoints save, by name."""
    weights = {name: parameter.detach().clone() for name, parameter in named}
    return {**weights, **{name: value.clone() for name, value in state_tensors(guard.optimizer, named)}}


def _restore(guard: StepGuard, named: Named, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in [*named, *state_tensors(guard.optimizer, named)]:
            tensor.copy_(values[name])
    guard.read_counters()


def _stepped(guard: StepGuard, named: Named, setup: TrainingSetup) -> dict[str, Tensor]:
    """Take step 1 with gradients that are the same at each call; returns copies of weights and state after it, by
    name."""
    for place, (_, parameter) in enumerate(named):
        parameter.grad = drawn(tuple(parameter.shape), parameter.dtype, setup, 20 + place)
    guard.prepare()
    guard.step(1)
    guard.accept()
    for _, parameter in named:
        parameter.grad = None
    return _values(guard, named)
