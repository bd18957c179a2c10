"""Memory settings as one value: applied, read back, undone, and sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.model.loss import LossFunction
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.ladder import (
    MemorySettings,
    adopt_memory,
    apply_settings,
    current_settings,
    effective_spec,
    memory_as_json,
)
from tests.present import present
from tests.train.run_helpers import Workshop, make_spec, write_samples


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TrainingSetup]:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), train={"gradient_checkpointing": False})
    with Workshop(spec, tmp_path / "place") as built:
        yield built


def other(settings: MemorySettings) -> MemorySettings:
    """Settings that all differ from those in `settings`."""
    return MemorySettings(
        settings.micro_batch_budget // 2, settings.checkpointing + 3, present(settings.chunk_tokens) // 2,
        not settings.activation_offload, not settings.optimizer_offload, 24, 4 * settings.mlp_tiles,
    )  # fmt: skip


def test_settings_are_applied_in_full_and_undone_in_full(setup: TrainingSetup) -> None:
    context, before = setup.context, current_settings(setup.context)
    static_bytes = context.static_bytes
    apply_settings(context, other(before))
    assert current_settings(context) == other(before)
    assert context.static_bytes == context.device.memory().allocated_bytes < static_bytes
    assert int(context.data.lengths.max()) == 24
    apply_settings(context, before)
    assert current_settings(context) == before
    assert context.static_bytes == static_bytes
    assert int(context.data.lengths.max()) > 24


def test_a_loss_without_chunks_gets_them_and_goes_back(setup: TrainingSetup) -> None:
    """Regression: the rung halved a chunk size that the plain loss does not use."""
    loss = setup.context.loss
    setup.context.loss = LossFunction(loss.loaded, loss.head, "plain", loss.label_smoothing, 110)
    before = current_settings(setup.context)
    assert before.chunk_tokens is None
    apply_settings(setup.context, replace(before, chunk_tokens=32))
    assert (setup.context.loss.implementation, setup.context.loss.chunk_tokens) == ("chunked", 32)
    apply_settings(setup.context, before)
    assert setup.context.loss.implementation == "plain"
    # A kernel that was given up for good does not come back with the settings of an earlier checkpoint.
    setup.context.loss.implementation = "chunked"
    apply_settings(setup.context, before)
    assert setup.context.loss.implementation == "chunked"


def test_what_was_saved_as_json_is_adopted(setup: TrainingSetup) -> None:
    context, before = setup.context, current_settings(setup.context)
    saved = json.loads(json.dumps(memory_as_json(context)))
    apply_settings(context, other(before))
    context.budget.record_success(100, 100)
    adopt_memory(context, saved)
    assert current_settings(context) == before
    assert memory_as_json(context) == saved


IN_CHECKPOINTS: dict[str, Any] = {
    "budget": {
        "budget_bytes": 640, "top_bytes": 1000, "proven_bytes": 600, "since_cut_bytes": 600, "ceiling_bytes": 800,
        "passing_bytes": None, "passing_room_bytes": 0, "known_bytes": 0, "patience_steps": 100, "slope": 1.5,
        "expected_slope": 1.0, "clean_steps": 7, "thrashed_steps": 0,
    },
    "remedies": {
        "checkpointing": True, "chunk_tokens": 64, "activation_offload": False, "optimizer_offload": True,
        "max_length": 24,
    },
    "standing": [
        {
            "name": "optimizer_offload", "before": False, "after": True, "failed_bytes": 600, "room_bytes": 500,
            "passing": True, "learned": {"budget_bytes": 640, "top_bytes": 1000}, "moved_bytes": 4096,
        }
    ],
}  # fmt: skip
"""What `state.json` of a checkpoint holds about memory. Runs of earlier versions are resumed from it."""


ADDED = {"floor_tokens": 0, "launch_tokens": 256}
"""Fields of the budget that earlier versions did not have, with the values that their runs get."""


def test_what_checkpoints_hold_is_read_and_written_in_the_same_form(setup: TrainingSetup) -> None:
    adopt_memory(setup.context, json.loads(json.dumps(IN_CHECKPOINTS)))
    layers = setup.context.loaded.layers
    assert current_settings(setup.context) == MemorySettings(640, layers, 64, False, True, 24)
    written = json.loads(json.dumps(memory_as_json(setup.context)))
    now = {
        "budget": IN_CHECKPOINTS["budget"] | ADDED,
        "remedies": IN_CHECKPOINTS["remedies"] | {"checkpointing": layers, "mlp_tiles": 1},
    }
    assert written == IN_CHECKPOINTS | now, "true stood for all layers"
    adopt_memory(setup.context, written)
    assert memory_as_json(setup.context) == written


def test_the_effective_spec_names_what_is_in_force(setup: TrainingSetup) -> None:
    apply_settings(setup.context, other(current_settings(setup.context)))
    train = effective_spec(setup.spec, setup.context).recipe.train
    assert (train.gradient_checkpointing, train.activation_offload, train.optimizer_offload) == (3, True, True)
    assert train.mlp_tiles == 4
