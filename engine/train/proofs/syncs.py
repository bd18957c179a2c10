"""Proof: the host does not wait for the device inside a micro-batch, so that it runs ahead with the next operations.

Try: `pytest tests/train/test_host_syncs.py`
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.batching.micro_batches import plan_micro_batches
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup
from engine.train.step.computation import StepComputation, StepTokens


def applies(setup: TrainingSetup) -> bool:
    """Whether micro-batches contain no collectives, so that one rank can run one alone."""
    return setup.context.strategy.voted_group is None


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on: model, method, kernels, and the settings that change how a micro-batch is
    computed."""
    recipe, context = setup.spec.recipe, setup.context
    about = [recipe.model, recipe.method, recipe.data.packing, recipe.train.gradient_checkpointing]
    return [*map(str, about), context.loaded.attention, context.loss.implementation, str(context.loss.offload.on)]


def prove(setup: TrainingSetup) -> str:
    """Run a micro-batch of the shortest sample and count how often the host waits for the device. Returns what was
    shown, in a few words. Raises DisprovedError if it waits at all. The micro-batch budget is restored and the
    gradients are dropped."""
    context = setup.context
    samples = np.array([context.data.lengths.argmin()])
    plan = plan_micro_batches(context.data.lengths[samples], context.cost, context.budget.budget_bytes)
    budget, context.budget = context.budget, replace(context.budget)
    try:
        found = StepComputation(context).host_syncs(1, samples, plan[0], StepTokens(1, 1))
    finally:
        context.budget = budget
        context.strategy.drop_gradients()
        if any(True for _ in context.rollback.moving()):
            context.rollback.restore()
    if found:
        raise DisprovedError(f"the host waits {len(found)} times for the device in a micro-batch, first in {found[0]}")
    return "the host waits for the device nowhere in a micro-batch"


def fall_back(setup: TrainingSetup) -> str:
    """Do nothing, because waiting costs time and changes no result; returns a few words that say so."""
    return "none is needed: it costs time and changes no result"
