"""Memory settings as one value: applied, read back, undone, and sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.train.recovery.memory_settings import (
    MemorySettings,
    adopt_memory,
    apply_settings,
    current_settings,
    effective_spec,
    memory_as_json,
)
from engine.train.setup import Bench
from tests.train.harness import Workshop, make_spec, write_samples


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), train={"gradient_checkpointing": False})
    with Workshop(spec, tmp_path / "place") as built:
        yield built


def other(settings: MemorySettings) -> MemorySettings:
    """Settings of which each differs from that in `settings`."""
    return MemorySettings(
        settings.micro_batch_budget // 2, not settings.checkpointing, settings.chunk_tokens // 2,
        not settings.activation_offload, not settings.optimizer_offload, 24,
    )  # fmt: skip


def test_settings_are_applied_in_full_and_undone_in_full(bench: Bench) -> None:
    parts, before = bench.parts, current_settings(bench.parts)
    static_bytes = parts.static_bytes
    apply_settings(parts, other(before))
    assert current_settings(parts) == other(before)
    assert parts.static_bytes == parts.device.memory().allocated_bytes < static_bytes
    assert int(parts.data.lengths.max()) == 24
    apply_settings(parts, before)
    assert current_settings(parts) == before
    assert parts.static_bytes == static_bytes
    assert int(parts.data.lengths.max()) > 24


def test_what_was_saved_as_json_is_adopted(bench: Bench) -> None:
    parts, before = bench.parts, current_settings(bench.parts)
    saved = json.loads(json.dumps(memory_as_json(parts)))
    apply_settings(parts, other(before))
    parts.budget.record_success(100, 100)
    adopt_memory(parts, saved)
    assert current_settings(parts) == before
    assert memory_as_json(parts) == saved


def test_the_effective_spec_names_what_is_in_force(bench: Bench) -> None:
    apply_settings(bench.parts, other(current_settings(bench.parts)))
    train = effective_spec(bench.spec, bench.parts).recipe.train
    assert (train.gradient_checkpointing, train.activation_offload, train.optimizer_offload) == (True, True, True)
