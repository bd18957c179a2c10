"""The last rungs of the ladder: tensors move to the host, and sequences are shortened only if the recipe allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

ONE_AT_A_TIME = {"batch_size": 8, "micro_batch": 1, "gradient_checkpointing": False, "max_steps": 3}


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl", longest=400)


def test_activations_move_to_the_host_when_one_sequence_does_not_fit(tmp_path: Path, samples: Path) -> None:
    tables: dict[str, Any] = {"train": ONE_AT_A_TIME, "data": {"max_length": 400}}
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, **tables)))
    peak = max(event["peak_bytes"] for event in of_kind(roomy, "step"))
    tight = make_spec(samples, memory_gib=0.85 * peak / 2**30, backoff={"ladder": ["activation_offload"]}, **tables)
    code, events = train(new_run(tmp_path / "tight", tight))
    assert code == 0
    assert [event["remedy"] for event in of_kind(events, "backoff")] == ["activation_offload"]
    assert losses(events) == pytest.approx(losses(roomy), rel=1e-5)
    assert max(event["peak_bytes"] for event in of_kind(events, "step")) < 0.85 * peak


def test_feed_forward_blocks_are_tiled_when_one_sequence_does_not_fit(tmp_path: Path, samples: Path) -> None:
    tables: dict[str, Any] = {"train": {**ONE_AT_A_TIME, "gradient_checkpointing": True}, "data": {"max_length": 400}}
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, **tables)))
    peak = max(event["peak_bytes"] for event in of_kind(roomy, "step"))
    tight = make_spec(samples, memory_gib=0.93 * peak / 2**30, backoff={"ladder": ["tile_mlp"]}, **tables)
    place = new_run(tmp_path / "tight", tight)
    code, events = train(place)
    assert code == 0
    assert {event["remedy"] for event in of_kind(events, "backoff")} == {"tile_mlp"}
    assert losses(events) == pytest.approx(losses(roomy), rel=1e-5)
    assert max(event["peak_bytes"] for event in of_kind(events, "step")) < 0.93 * peak
    finished = of_kind(events, "run_finished")[0]["measured"]
    assert finished["predicted"]["peak_bytes"] == pytest.approx(finished["peak_bytes"], rel=0.01)


def test_offloaded_activations_go_together_with_checkpointing(tmp_path: Path, samples: Path) -> None:
    train_table = {**ONE_AT_A_TIME, "gradient_checkpointing": True}
    _, kept = train(new_run(tmp_path / "kept", make_spec(samples, train=train_table)))
    spec = make_spec(samples, train={**train_table, "activation_offload": True})
    code, moved = train(new_run(tmp_path / "moved", spec))
    assert code == 0
    assert losses(moved) == losses(kept)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_state_on_the_host_gives_the_same_steps_to_the_bit(tmp_path: Path, samples: Path, optimizer: str) -> None:
    tables: dict[str, Any] = {"train": {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}}
    _, kept = train(new_run(tmp_path / "kept", make_spec(samples, **tables)))
    tables["train"]["optimizer_offload"] = True
    place = new_run(tmp_path / "moved", make_spec(samples, **tables))
    code, moved = train(place)
    assert code == 0
    assert losses(moved) == losses(kept)
    assert of_kind(moved, "run_finished")[0]["measured"]["components"]["optimizer"] == 0


def test_optimizer_state_moves_to_the_host_when_nothing_else_is_left(tmp_path: Path, samples: Path) -> None:
    tables: dict[str, Any] = {"train": {**ONE_AT_A_TIME, "max_steps": 6}, "data": {"max_length": 400}}
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, **tables)))
    peak = max(event["peak_bytes"] for event in of_kind(roomy, "step"))
    tables["checkpoint"] = {"every_steps": 3}
    tight = make_spec(samples, memory_gib=0.85 * peak / 2**30, backoff={"ladder": ["optimizer_offload"]}, **tables)
    place = new_run(tmp_path / "tight", tight)
    code, events = train(place)
    assert code == 0
    assert [event["remedy"] for event in of_kind(events, "backoff")] == ["optimizer_offload"]
    assert losses(events) == losses(roomy)


def test_a_resumed_run_finds_its_state_on_the_host_again(tmp_path: Path, samples: Path) -> None:
    spec = make_spec(samples, train={"optimizer_offload": True, "max_steps": 4}, checkpoint={"every_steps": 2})
    _, whole = train(new_run(tmp_path / "whole", spec))
    place = new_run(tmp_path / "broken", spec)
    train(place)
    for path in place.checkpoints.glob("step-00000004"):
        (path / "manifest.json").unlink()
    code, events = train(place, resume=True)
    assert code == 0
    assert losses(events) == losses(whole)
    assert not of_kind(events, "backoff")


def test_sequences_are_cut_only_where_the_recipe_allows_it_and_it_is_said(tmp_path: Path, samples: Path) -> None:
    tables: dict[str, Any] = {"train": ONE_AT_A_TIME, "data": {"max_length": 400}}
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, **tables)))
    memory_gib = 0.9 * max(event["peak_bytes"] for event in of_kind(roomy, "step")) / 2**30
    refused = make_spec(samples, memory_gib=memory_gib, backoff={"ladder": ["cut"]}, **tables)
    assert train(new_run(tmp_path / "refused", refused))[0] == 4
    backoff = {"ladder": ["cut"], "allow_learning_changes": ["max_length"]}
    allowed = make_spec(samples, memory_gib=memory_gib, backoff=backoff, **tables)
    code, events = train(new_run(tmp_path / "allowed", allowed))
    assert code == 0
    assert {event["remedy"] for event in of_kind(events, "backoff")} == {"max_length"}
    assert any(event["code"] == "learning_changed" for event in of_kind(events, "warning"))
    assert sum(event["tokens"] for event in of_kind(events, "step")) < sum(e["tokens"] for e in of_kind(roomy, "step"))
