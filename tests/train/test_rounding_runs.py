"""Runs in bf16 with exact and stochastic rounding continue bit for bit after a resume, and with optimizer state on the
host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.config.load import dump_run_spec
from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.train.strategy.checkpoint_storage import require_same_parameters
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

WAYS: dict[str, dict[str, Any]] = {
    "exact": {"rounding": "exact"},
    "stochastic, state in bf16": {"rounding": "stochastic", "state_dtype": "bfloat16"},
    "exact, sgd": {"rounding": "exact", "optimizer": "sgd", "momentum": 0.9},
}
STEPS = 4


def tables(way: str, steps: int, **more: Any) -> dict[str, Any]:
    schedule = {"max_steps": steps, "scheduler": "constant", "warmup_steps": 0, "learning_rate": 1e-4}
    return {"model": {"dtype": "bfloat16"}, "train": {**schedule, "batch_size": 4, **WAYS[way], **more}}


def files_of(place: RunDirectory) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    checkpoint = place.checkpoint(STEPS)
    return load_file(checkpoint / "weights" / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", count=16, longest=24)


@pytest.fixture(scope="module", params=WAYS)
def straight(request: pytest.FixtureRequest, samples: Path) -> tuple[str, RunDirectory, list[dict[str, Any]]]:
    """For each way of rounding: the way, its run without interruption, and the events of that run."""
    place = new_run(samples.parent / request.param / "straight", make_spec(samples, **tables(request.param, STEPS)))
    code, events = train(place)
    assert code == 0
    return request.param, place, events


def assert_same(here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


def test_a_resumed_run_has_the_weights_remainders_and_state_of_one_without_interruption(
    straight: tuple[str, RunDirectory, list[dict[str, Any]]], samples: Path
) -> None:
    way, whole, events = straight
    place = new_run(samples.parent / way / "legs", make_spec(samples, **tables(way, STEPS // 2)))
    assert train(place)[0] == 0
    place.run_toml.write_text(dump_run_spec(make_spec(samples, **tables(way, STEPS))))
    code, in_legs = train(place, resume=True)
    assert code == 0 and of_kind(in_legs, "resumed")
    assert losses(in_legs) == losses(events)
    found = files_of(place)
    assert_same(found, files_of(whole))
    remainders = [name for name in found if name.endswith("::remainder")]
    assert bool(remainders) == way.startswith("exact")
    assert not remainders or any(bool(found[name].any()) for name in remainders)


def test_state_and_remainders_on_the_host_change_nothing(
    straight: tuple[str, RunDirectory, list[dict[str, Any]]], samples: Path
) -> None:
    way, whole, _ = straight
    spec = make_spec(samples, **tables(way, STEPS, optimizer_offload=True))
    place = new_run(samples.parent / way / "offloaded", spec)
    assert train(place)[0] == 0
    assert_same(files_of(place), files_of(whole))


def test_a_run_does_not_go_on_with_another_rounding(samples: Path, tmp_path: Path) -> None:
    nearest = {"rounding": "nearest", "state_dtype": "bfloat16"}
    place = new_run(tmp_path, make_spec(samples, **tables("exact", 1, **nearest)))
    assert train(place)[0] == 0
    place.run_toml.write_text(dump_run_spec(make_spec(samples, **tables("exact", STEPS))))
    code, events = train(place, resume=True)
    assert code == 2
    error = of_kind(events, "run_finished")[-1]["error"]
    assert "train.rounding: 'nearest' -> 'exact'" in error and "restore these keys in run.toml" in error


def test_a_checkpoint_from_before_remainders_were_kept_is_refused_with_the_way_out() -> None:
    saved = {"weight::exp_avg", "weight::exp_avg_sq"}
    with pytest.raises(UsageError, match="without remainders") as caught:
        require_same_parameters(Path("step-00000001"), saved, {*saved, "weight::remainder"})
    assert 'train.rounding = "nearest"' in caught.value.fix
