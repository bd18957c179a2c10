"""Fixes of sweeps of which a part does not fit, of layers that share a weight, and of host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.schema.recipe import Method
from engine.errors import TunedeckError
from engine.extras.handover.merge import merge_rounded_once, refuse_shared
from engine.model.adapters import add_adapters
from engine.train.step.computation import BatchLoader
from tests.cli.conftest import Tunedeck
from tests.cli.test_fixes import own_files
from tests.cli.test_gate import LLAMA
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.model.samples import load, run_spec, write_model
from tests.train.run_helpers import make_spec, new_run, train, write_samples

WALKED = (
    "launch/create_run:queue_sweep",
    "extras/handover/merge:refuse_shared",
    "train/step/failures:memory_exhausted: end other",
)
"""The fix texts that the tests below execute."""


def test_points_of_a_sweep_that_do_not_fit_are_queued_by_force(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    own_files(tmp_path)
    (tmp_path / "model").mkdir()
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    (tmp_path / "model" / "config.json").write_text(json.dumps(large))
    values = 'sweep."model.id"=["builtin:tiny", "./model"]'
    refused = tunedeck("queue", "add", "-p", "mine", "-r", "r.toml", "--set", values)
    assert refused.code == 3 and was_given(text_of(WALKED[0]), given), refused.err
    one = ("plan", "-p", "mine", "-r", "r.toml", "--set")
    assert tunedeck(*one, "model.id=./model").code == 3
    assert tunedeck(*one, "model.id=builtin:tiny").code == 0
    answer = tunedeck("queue", "add", "-p", "mine", "-r", "r.toml", "--set", values, "--force")
    assert answer.code == 0, answer.err
    (line,) = tunedeck("queue", "list").out.splitlines()
    assert "id=builtin_tiny" in line


def test_layers_that_share_a_weight_are_left_out_and_merged(tmp_path: Path, given: Given) -> None:
    folder = str(write_model(tmp_path / "model", "llama"))
    for exclude in ([], ["*.v_proj"]):
        base = load(run_spec(folder, method={"kind": "full"})).base
        for layer in base.model.layers:
            layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight
        wrapped, _ = add_adapters(base, Method(kind="lora", rank=4, targets="attention", exclude=exclude))
        if exclude:
            refuse_shared(wrapped, folder)
            assert merge_rounded_once(wrapped) is not None
        else:
            with pytest.raises(TunedeckError):
                refuse_shared(wrapped, folder)
            assert was_given(text_of(WALKED[1]), given)


def test_a_run_that_host_memory_ended_goes_on_when_others_have_left_it_some(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = write_samples(tmp_path / "rows.jsonl", count=16)
    place = new_run(tmp_path / "runs", make_spec(samples, train={"max_steps": 2, "batch_size": 2}))

    def full(*_: object, **__: object) -> None:
        raise MemoryError("as while other programs hold the memory of the machine")

    with monkeypatch.context() as others:
        others.setattr(BatchLoader, "batches", full)
        assert train(place)[0] == 4
    assert was_given(text_of(WALKED[2]), given), given
    assert train(place, resume=True)[0] == 0
