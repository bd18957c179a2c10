"""The rungs that move memory to the host: they survive where nothing else is allowed, and learn the same."""

from __future__ import annotations

import pytest

from tests.train.harness import losses, make_spec, new_run, of_kind, train, write_samples

ONE_AT_A_TIME = {"batch_size": 8, "micro_batch": 1, "gradient_checkpointing": False, "max_steps": 3}


@pytest.fixture
def samples(tmp_path):
    return write_samples(tmp_path / "samples.jsonl", longest=400)


def test_activations_move_to_the_host_when_one_sequence_does_not_fit(tmp_path, samples):
    tables = {"train": ONE_AT_A_TIME, "data": {"max_length": 400}}
    _, roomy = train(new_run(tmp_path / "roomy", make_spec(samples, **tables)))
    peak = max(event["peak_bytes"] for event in of_kind(roomy, "step"))
    tight = make_spec(samples, memory_gib=0.85 * peak / 2**30, backoff={"ladder": ["activation_offload"]}, **tables)
    code, events = train(new_run(tmp_path / "tight", tight))
    assert code == 0
    assert [event["remedy"] for event in of_kind(events, "backoff")] == ["activation_offload"]
    assert losses(events) == pytest.approx(losses(roomy), rel=1e-5)
    assert max(event["peak_bytes"] for event in of_kind(events, "step")) < 0.85 * peak


def test_offloaded_activations_go_together_with_checkpointing(tmp_path, samples):
    train_table = {**ONE_AT_A_TIME, "gradient_checkpointing": True}
    _, kept = train(new_run(tmp_path / "kept", make_spec(samples, train=train_table)))
    spec = make_spec(samples, train={**train_table, "activation_offload": True})
    code, moved = train(new_run(tmp_path / "moved", spec))
    assert code == 0
    assert losses(moved) == losses(kept)
