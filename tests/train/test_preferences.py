"""Preference learning: the losses and weights of TRL's DPOTrainer, whatever the split, the reference and the memory."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

from engine.batching.budget import MicroBatchBudget
from engine.config.schema.preference import Preference
from engine.config.schema.run import RunSpec
from engine.evaluate.run import score_run
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal
from engine.model.tokenizer import load_tokenizer
from engine.objectives.preference import METRICS, WIN_RATE, sequence_losses
from engine.train.run.preferences import learn_preferences
from engine.train.step.objective import plan_pairs
from engine.train.step.transaction import StepOutcome, StepTransaction
from tests.present import metered
from tests.train.beside_trl import (
    LONG_STEPS,
    STEPS,
    TRAIN,
    WEIGHTS,
    AsTheyAre,
    arguments_of,
    differing_weights,
    prompt_tokens,
    rows_of,
    started,
    train_of,
    weights_of,
)
from tests.train.preference_rows import write_pairs
from tests.train.run_helpers import Event, Workshop, losses, make_spec, new_run, of_kind, train
from tests.train.test_resume import started_until_step

LORA = {"kind": "lora", "rank": 8, "alpha": 16, "targets": "all-linear", "objective": "dpo"}
FULL = {"kind": "full", "objective": "dpo"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights, and pairs in a fixed order."""
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs.jsonl", count=24)
    write_pairs(folder / "held.jsonl", count=6, seed=1)
    tokenizer = load_tokenizer(make_spec(folder / "pairs.jsonl").recipe.model)
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder


def spec_of(base: Path, method: dict[str, Any], preference: dict[str, Any], **tables: Any) -> RunSpec:
    source = {"name": "main", "path": str(base / "pairs.jsonl")}
    given: dict[str, Any] = {
        "device": "cpu",
        "model": {"id": str(base / "base"), "tokenizer": str(base / "base"), "init": "pretrained"},
        "data": {"sources": [source], "max_length": 96, "shuffle": False},
        "train": TRAIN,
        **tables,
    }
    return make_spec(base / "pairs.jsonl", method=method, preference=preference, **given)


class Theirs(AsTheyAre, DPOTrainer):
    """TRL's trainer on our pairs."""


def with_trl(spec: RunSpec, model: Any, folder: Path, reference: Any, **loss: Any) -> Any:
    """Train `model` on the same pairs in the same order."""
    tokenizer, data = rows_of(spec)
    rows, table = list(data), []
    for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
        prompt = prompt_tokens(chosen)
        assert (chosen.input_ids[:prompt] == rejected.input_ids[:prompt]).all()
        answers = {
            "chosen_ids": chosen.input_ids[prompt:].tolist(),
            "rejected_ids": rejected.input_ids[prompt:].tolist(),
        }
        table.append({"prompt_ids": chosen.input_ids[:prompt].tolist(), **answers})
    trainer = Theirs(
        model=model, ref_model=reference, args=DPOConfig(**arguments_of(spec, folder), **loss),
        train_dataset=Dataset.from_list(table), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lora": (LORA, {}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "full": (FULL, {}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": (LORA, {"loss": "ipo", "beta": 0.2}, {"loss_type": ["ipo"], "beta": 0.2}),
    "sft term": (
        LORA,
        {"sft_weight": 0.5, "beta": 0.3},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
    ),
    "by length": (
        LORA, {"length_normalised": True, "beta": 2.0}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [STEPS, pytest.param(LONG_STEPS, marks=pytest.mark.torture)])
@pytest.mark.parametrize(("method", "preference", "theirs"), CASES.values(), ids=CASES.keys())
def test_losses_rewards_and_weights_are_those_of_trl(
    tmp_path: Path, base: Path, method: dict[str, Any], preference: dict[str, Any], theirs: dict[str, Any], steps: int
) -> None:
    spec = spec_of(base, method, preference, train=train_of(steps))
    model = started(spec)
    reference = None if method is LORA else AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float32)
    trainer = with_trl(spec, model, tmp_path / "theirs", reference, **theirs)
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    ours = of_kind(events, "step")
    assert code == 0 and len(ours) == steps
    assert [step["loss"] for step in ours] == pytest.approx(trainer.seen, rel=1e-5, abs=1e-6)
    logged = [row for row in trainer.state.log_history if "rewards/chosen" in row]
    rounding = 1e-5 * max(1.0, preference.get("beta", 0.1))  # a reward is beta times what two sums in float32 differ by
    for name in ("chosen", "rejected", "margin"):
        its = [row[f"rewards/{name}s" if name == "margin" else f"rewards/{name}"] for row in logged]
        assert [step[f"rewards_{name}"] for step in ours] == pytest.approx(its, rel=1e-5, abs=rounding), name
    assert differing_weights(weights_of(base, place, method), trainer.model, WEIGHTS[steps]) == {}


def pairs_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probabilities of the policy, of the reference, tokens) of `count` pairs."""
    drawn = np.random.default_rng(seed)
    tokens = torch.from_numpy(drawn.integers(1, 60, 2 * count).astype(np.float64))
    policy, reference = (-tokens * torch.from_numpy(drawn.uniform(0.2, 3.0, 2 * count)) for _ in range(2))
    return policy, reference, tokens


def by_paper(asked: Preference, policy: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each pair, as the papers write it, in float64."""
    mean = policy / tokens
    margin = (policy - reference)[0::2] - (policy - reference)[1::2]
    if asked.loss == "dpo":
        good, bad = torch.sigmoid(asked.beta * margin).log(), torch.sigmoid(-asked.beta * margin).log()
        return -(1 - asked.label_smoothing) * good - asked.label_smoothing * bad
    if asked.loss == "simpo":
        return -torch.sigmoid(asked.beta * (mean[0::2] - mean[1::2]) - asked.margin).log()
    likelihood = mean.exp()
    odds = likelihood / (1 - likelihood)
    return -mean[0::2] - asked.beta * torch.sigmoid((odds[0::2] / odds[1::2]).log()).log()


@pytest.mark.parametrize(
    "asked",
    [
        Preference(beta=0.3, label_smoothing=0.2),
        Preference(loss="simpo", beta=2.0, margin=0.7),
        Preference(loss="orpo", beta=0.4),
    ],
    ids=lambda asked: asked.loss,
)
def test_losses_and_their_derivatives_are_those_of_the_papers(asked: Preference) -> None:
    policy, reference, tokens = pairs_of(50)
    found = sequence_losses(policy, reference if asked.needs_reference else None, tokens, asked, 0.0)
    policy.requires_grad_()
    wanted = by_paper(asked, policy, reference, tokens)
    (gradient,) = torch.autograd.grad(wanted.sum(), policy)
    assert torch.allclose(found.losses_S[0::2], wanted.detach(), rtol=1e-9, atol=1e-12)
    assert not found.losses_S[1::2].any()
    assert torch.allclose(found.weights_S, gradient, rtol=1e-7, atol=1e-12)


def test_likely_answers_have_finite_odds() -> None:
    found = sequence_losses(torch.tensor([-1e-9, -700.0]), None, torch.ones(2), Preference(loss="orpo"), 0.0)
    assert found.losses_S.isfinite().all() and found.weights_S.isfinite().all()


SGD = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "batch_size": 6, "max_steps": 1}


class Objective(Workshop):
    """A setup that learns preferences."""

    def __enter__(self) -> Any:
        setup = super().__enter__()
        learn_preferences(setup, RunDirectory(self.place.path), Journal(None))
        return setup


def one_step(
    folder: Path, spec: RunSpec, rows: float, faults: int = 0
) -> tuple[torch.Tensor, StepOutcome, list[Event]]:
    """Take one step with room for `rows` of the longest sequences; returns the trained weights, the step's outcome and
    the out-of-memory events. `faults`: in how many attempts, one after the other, some allocation fails."""
    workshop = Objective(spec, folder)
    with workshop as setup:
        context = setup.context
        whole = max(1, int(rows))
        budget_bytes = int(context.cost(whole, int(context.data.lengths.max())) * rows / whole)
        context.budget = MicroBatchBudget(budget_bytes, top_bytes=budget_bytes)
        for fault in range(faults):
            metered(context.device).fail_at(40 * fault + 7)
        outcome = StepTransaction(context).run(1, setup.order.step(1))
        vector = torch.cat([parameter.detach().flatten() for _, parameter in context.loaded.trainable()]).clone()
        return vector, outcome, of_kind(workshop.events(), "backoff")


@pytest.mark.parametrize("method", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_no_split_changes_the_gradient(tmp_path: Path, base: Path, method: dict[str, Any], loss: str) -> None:
    preference = {"loss": loss, "sft_weight": 0.3 if loss == "dpo" else 0.0}
    spec = spec_of(base, method, preference, device="metered", train=SGD)
    whole, together, _ = one_step(tmp_path / "whole", spec, 100)
    for name, rows in {"seven": 7, "pairs": 2.5, "sequences": 1.5, "one": 0.5}.items():
        weights, outcome, _ = one_step(tmp_path / name, spec, rows)
        assert outcome.micro_batches > together.micro_batches
        assert outcome.loss == pytest.approx(together.loss, rel=1e-6)
        assert outcome.metrics == pytest.approx(together.metrics, rel=1e-5, abs=1e-6)
        assert torch.allclose(weights, whole, atol=2e-6)


def test_a_step_that_ran_out_of_memory_learns_the_same(tmp_path: Path, base: Path) -> None:
    spec = spec_of(base, LORA, {}, device="metered", train=SGD)
    undisturbed, _, none = one_step(tmp_path / "whole", spec, 2.5)
    weights, outcome, failures = one_step(tmp_path / "failing", spec, 2.5, faults=1)
    assert not none and failures and outcome.applied
    assert torch.allclose(weights, undisturbed, atol=2e-6)


def test_pairs_stay_together_where_two_sequences_fit() -> None:
    lengths = np.array([5, 7, 90, 3, 10, 10, 8, 60], np.int32)
    groups = plan_pairs(lengths, lambda rows, length, patches=None: rows * length, 100, 0, None, 0)
    assert sorted(member for group in groups for member in group.members) == list(range(8))
    assert all(group.cost_bytes <= 100 for group in groups)
    assert [group.cost_bytes for group in groups] == sorted((group.cost_bytes for group in groups), reverse=True)
    whole = [group.members for group in groups if set(group.members) & {0, 1, 4, 5}]
    assert all(members[place] + 1 == members[place + 1] for members in whole for place in range(0, len(members), 2))


def test_a_reference_is_computed_once_and_survives_a_kill(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full fine-tuning; the second engine finds the pieces of the first, and one that is damaged is made anew."""
    validation = [{"name": "held", "path": str(base / "held.jsonl")}]
    source = {"name": "main", "path": str(base / "pairs.jsonl")}
    data = {"sources": [source], "validation": validation, "max_length": 96}
    spec = spec_of(base, FULL, {}, data=data, train={**TRAIN, "max_steps": 4}, eval={"every_steps": 2})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    pieces = sorted((place.path / "reference").iterdir())
    assert code == 0 and [piece.name for piece in pieces] == ["train-000000000.json", "validation-000000000.json"]
    first = {piece: piece.read_text() for piece in pieces}
    scores = [event["metrics"] for event in of_kind(events, "eval")]
    assert all(score.keys() == {"loss", WIN_RATE, *METRICS} for score in scores)
    ((step, scored),) = score_run(place, None, lambda text: None)
    assert step == 4 and scored.metrics == pytest.approx(scores[-1], rel=1e-5, abs=1e-6)
    pieces[0].write_text(first[pieces[0]][:-20])
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "empty"))
    with Objective(spec, place.path):
        pass
    assert {piece: piece.read_text() for piece in pieces} == first


def referred(place: RunDirectory) -> dict[str, str]:
    return {piece.name: piece.read_text() for piece in sorted((place.path / "reference").iterdir())}


def test_a_reference_is_shared_by_runs_from_the_same_weights(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another loss finds the values of the first; one from other weights, or other tokens, does not."""
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    steps, held = {**TRAIN, "max_steps": 1}, {"name": "main", "path": str(base / "held.jsonl")}
    other = tmp_path / "other"
    shutil.copytree(base / "base", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.5 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    specs = {
        "first": spec_of(base, FULL, {}, train=steps),
        "other loss": spec_of(base, FULL, {"loss": "ipo"}, train={**steps, "learning_rate": 1e-5}),
        "other weights": spec_of(base, FULL, {}, train=steps, model={"id": str(other), "init": "pretrained"}),
        "other tokens": spec_of(base, FULL, {}, train=steps, data={"sources": [held]}),
    }
    found, computed = {}, {}
    for name, spec in specs.items():
        place = new_run(tmp_path / name, spec)
        code, events = train(place)
        assert code == 0
        found[name] = referred(place)
        assert of_kind(events, "micro_batch")[0]["sequences"] == spec.recipe.sequences_per_step
        computed[name] = [event for event in of_kind(events, "phase") if event["name"] == "computing the reference"]
    assert found["first"] == found["other loss"] and not computed["other loss"]
    assert all(computed[name] for name in ("first", "other weights", "other tokens"))
    assert found["first"] != found["other weights"] and found["first"] != found["other tokens"]


@pytest.mark.parametrize(("method", "rows"), [(LORA, 4), (FULL, 1)], ids=["lora", "full, a sequence at a time"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, base: Path, method: dict[str, Any], rows: int) -> None:
    """With an adapter the reference is the model that is resumed, with its adapter off; in full fine-tuning its
    log-probabilities are those of the start, not of the checkpoint."""
    steps = {**TRAIN, "max_steps": 12, "micro_batch": rows}
    spec = spec_of(base, method, {}, train=steps, checkpoint={"every_steps": 5, "every_minutes": 0})
    undisturbed, killed = (new_run(tmp_path / name, spec) for name in ("undisturbed", "killed"))
    code, events = train(undisturbed)
    process = started_until_step(killed, 7)
    process.send_signal(signal.SIGKILL)
    process.wait()
    code_resumed, resumed = train(killed, resume=True)
    assert code == code_resumed == 0 and of_kind(resumed, "resumed")
    assert losses(resumed) == losses(events)
    expected, found = (weights_of(base, place, method) for place in (undisturbed, killed))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_reference_of_an_adapter_that_goes_on_is_that_adapter(tmp_path: Path, base: Path) -> None:
    """Also where model.id names the run that trained it, as a stage after another does."""
    first = new_run(tmp_path / "runs", spec_of(base, LORA, {}, train={**TRAIN, "max_steps": 4, "learning_rate": 1e-2}))
    assert train(first)[0] == 0
    validation = [{"name": "held", "path": str(base / "held.jsonl")}]
    data = {
        "sources": [{"name": "main", "path": str(base / "pairs.jsonl")}],
        "max_length": 96,
        "validation": validation,
    }
    spec = spec_of(
        base,
        LORA,
        {},
        model={"id": f"run:{first.path}", "init": "pretrained"},
        data=data,
        train={**TRAIN, "max_steps": 2},
    )
    second = new_run(tmp_path / "runs", spec)
    code, events = train(second)
    steps = of_kind(events, "step")
    assert code == 0 and steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[0]["rewards_margin"] == pytest.approx(0.0, abs=1e-4) and (second.path / "reference").is_dir()
    ((_, scored),) = score_run(second, None, lambda text: None)
    (held,) = [event["metrics"] for event in of_kind(events, "eval") if event["step"] == 2]
    assert scored.metrics["rewards_margin"] == pytest.approx(held["rewards_margin"], abs=1e-4)
