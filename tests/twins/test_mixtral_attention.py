"""The twin of mixtral-8x7b-attention: adapters on attention, a router that learns, an auxiliary loss, a sweep."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import DivergedError
from engine.journal.compare import compare
from engine.journal.directory import RunDirectory
from engine.journal.summary import summarise
from engine.launch.create_run import queue_sweep
from engine.model.loss import loss_of
from engine.train.run import expert_utilisation
from tests.events import read_events
from tests.model.auxiliary_loss import gradients, ragged, reference
from tests.model.samples import cpu, disturb, load
from tests.trackers.look_alikes import install, points_of
from tests.train.run_helpers import Event, new_run, of_kind, train
from tests.twins.twin import twin, write_model

RECIPE = "mixtral-8x7b-attention"
GATE = re.compile(r"model\.layers\.\d+\.mlp\.gate\.weight")
ADAPTER = re.compile(r"base_model\.model\.model\.layers\.\d+\.self_attn\.[qkvo]_proj\.lora_[AB]\.weight")
NO_WORKERS = "data.workers=0"
"""Tokenises in this process: the result is the same, and workers take longer to start than these runs take."""
NO_TRACKER = "trackers.use=[]"

Weights = dict[str, torch.Tensor]


class Trained(NamedTuple):
    folder: Path
    run: RunDirectory
    events: list[Event]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Mixtral in bf16 and a few texts."""
    folder = tmp_path_factory.mktemp("mixtral")
    write_model(folder / "model", "mixtral", torch.bfloat16)
    drawn = random.Random(1)
    texts = ["fn " + "ab"[number % 2] * drawn.randint(4, 30) for number in range(96)]
    (folder / "all_data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """The twin as it ships, its tracker included."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, folder)
        run = new_run(folder / "runs", twin(RECIPE, folder, NO_WORKERS))
        code, events = train(run)
    assert code == 0
    return Trained(folder, run, events)


def saved(run: RunDirectory) -> Weights:
    return load_file(run.adapter / "adapter_model.safetensors")


def trained_with(folder: Path, *overrides: str) -> Weights:
    run = new_run(folder / "runs", twin(RECIPE, folder, NO_WORKERS, NO_TRACKER, *overrides, kind="cpu"))
    assert train(run)[0] == 0
    return saved(run)


def test_only_the_named_adapters_and_gates_are_saved(trained: Trained) -> None:
    names = set(saved(trained.run))
    adapters, gates = {name for name in names if ADAPTER.fullmatch(name)}, {name for name in names if GATE.search(name)}
    assert adapters | gates == names
    assert len(adapters) == 2 * 4 * 2 and len(gates) == 2


def test_it_is_better_than_untrained_on_held_out_data_and_its_tracker_has_every_loss(trained: Trained) -> None:
    first, *_, last = of_kind(trained.events, "eval")
    assert last["metrics"]["loss"] < first["metrics"]["loss"]
    assert all(event["aux_loss"] > 0 and "expert_utilisation" in event for event in of_kind(trained.events, "step"))
    losses = [(event["step"], "train/loss") for event in of_kind(trained.events, "step")]
    assert [point for point in points_of(trained.run, "tensorboard") if point[1] == "train/loss"] == losses


def test_auxiliary_gradients_are_the_reference_s_for_every_micro_batch(folder: Path) -> None:
    exact = ("model.dtype=float32", "method.dropout=0.0", "moe.aux_loss_weight=2.0")
    spec = twin(RECIPE, folder, *exact, kind="cpu")
    loaded, batch = load(spec), ragged()
    disturb(loaded)
    loss = loss_of(spec.recipe, loaded, cpu())
    by_size = {size: gradients(loaded, loss, batch, size) for size in (1, 4, 16)}
    loss.balance = None
    without = gradients(loaded, loss, batch, 16)
    loaded.model.zero_grad(set_to_none=True)
    (2.0 * reference(loaded, batch)).backward()
    for name, parameter in loaded.trainable():
        alone = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for found in by_size.values():
            torch.testing.assert_close(found[name] - without[name], alone, rtol=1e-6, atol=1e-6)


def test_weight_zero_is_bit_equal_to_none(folder: Path) -> None:
    none = trained_with(folder, "moe.aux_loss_weight=0.0", "moe.watch_experts=false")
    zero = trained_with(folder, "moe.aux_loss_weight=0.0")
    assert zero.keys() == none.keys() and all(torch.equal(zero[name], none[name]) for name in none)


def test_collapsed_gates_warn(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_utilisation, "LOGGED_STEPS", 3)
    write_model(tmp_path / "model", "mixtral", torch.bfloat16)
    _collapse(tmp_path / "model" / "model.safetensors")
    sets = (NO_WORKERS, NO_TRACKER, f"model.id={tmp_path / 'model'}")
    _, events = train(new_run(tmp_path / "runs", twin(RECIPE, folder, *sets, kind="cpu")))
    warnings = [event for event in of_kind(events, "warning") if event["code"].startswith("expert_")]
    assert [event["code"] for event in warnings] == ["expert_collapse", "expert_dead"] * 2
    assert all("aux_loss_weight" in event["fix"] and "freeze_router" in event["fix"] for event in warnings)


def _collapse(path: Path) -> None:
    """Let every token choose the first two experts of each layer: all tokens have one large value in common, by which
    the gates choose."""
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, 0] = 40.0
    for name, weight in weights.items():
        if name.endswith("post_attention_layernorm.weight"):
            weight[0] = 1.0
        if name.endswith("gate.weight"):
            weight[:, 0] = torch.tensor([9.0, 8.0, -8.0, -9.0])
    save_file(weights, path, {"format": "pt"})


def test_a_sweep_is_six_runs_of_which_one_diverges_and_the_others_are_done(folder: Path) -> None:
    # Decay multiplies the adapters by rate × decay in each step: only the last point leaves the range of floats.
    grid = 'sweep={"train.learning_rate" = [1e-4, 2e-4, 1e3], "train.weight_decay" = [0.01, 1e10]}'
    spec = twin(RECIPE, folder, NO_WORKERS, NO_TRACKER, grid, kind="cpu")
    runs, _ = queue_sweep(spec, folder / "sweep")
    codes = [train(run)[0] for run in runs]
    assert codes == [0, 0, 0, 0, 0, DivergedError.exit_code]
    assert [summarise(run).status for run in runs] == ["done"] * 5 + ["failed"]
    evals = [of_kind(list(read_events(run.events)), "eval") for run in runs]
    done = [min(event["metrics"]["loss"] for event in own if event["step"]) for own in evals[:5]]
    assert compare(runs).best["best_loss"] == [runs[done.index(min(done))].name]
