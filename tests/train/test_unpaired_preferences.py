"""KTO: the losses and weights of TRL's KTOTrainer, whatever the split, the reference and the memory."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer

from engine.batching.budget import MicroBatchBudget
from engine.config.schema.preference import Preference
from engine.config.schema.run import RunSpec
from engine.evaluate.run import score_run
from engine.objectives.kto import SUMS, answer_losses, divergence_of
from engine.train.step.transaction import StepOutcome, StepTransaction
from tests.present import metered
from tests.train.beside_trl import (
    BATCH,
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
from tests.train.run_helpers import Event, losses, new_run, of_kind, train
from tests.train.test_preferences import SGD, Objective, base, spec_of
from tests.train.test_resume import started_until_step

__all__ = ["base"]

LORA = {"kind": "lora", "rank": 8, "alpha": 16, "targets": "all-linear", "objective": "dpo"}
FULL = {"kind": "full", "objective": "dpo"}


def write_labelled(path: Path, *, count: int, seed: int = 0) -> Path:
    """Rows of KTO; two of three answers are desirable."""
    drawn = random.Random(seed)

    def text(least: int) -> str:
        return "".join(drawn.choices("abcdefghij klmnop", k=drawn.randint(least, 30)))

    with path.open("w") as file:
        for number in range(count):
            row = {"prompt": text(2), "completion": f"{text(1)}+{number}", "label": number % 3 != 1}
            file.write(json.dumps(row) + "\n")
    return path


def kto_spec(base: Path, method: dict[str, Any], preference: dict[str, Any] | None = None, **tables: Any) -> RunSpec:
    path = write_labelled(base / "labelled.jsonl", count=24)
    data = {"sources": [{"name": "main", "path": str(path)}], "max_length": 96, "shuffle": False}
    given = {"data": data, "train": TRAIN, **tables}
    return spec_of(base, method, {"loss": "kto", **(preference or {})}, **given)


class Theirs(AsTheyAre, KTOTrainer):
    """TRL's trainer on our answers."""


def rotated(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As TRL matches prompts with other answers: each with that before it in its batch."""
    for start in range(0, len(table), BATCH):
        batch = table[start : start + BATCH]
        for place, row in enumerate(batch):
            row["KL_completion_ids"] = batch[place - 1]["completion_ids"]
    return table


def with_trl(spec: RunSpec, model: Any, folder: Path, reference: Any, **loss: Any) -> Any:
    """Train `model` on the same answers in the same order."""
    tokenizer, data = rows_of(spec)
    table = []
    for row, desirable in zip(data, data.desirable.tolist(), strict=True):
        prompt, ids = prompt_tokens(row), row.input_ids.tolist()
        table.append({"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "label": desirable})
    trainer = Theirs(
        model=model, ref_model=reference, args=KTOConfig(**arguments_of(spec, folder), **loss),
        train_dataset=Dataset.from_list(rotated(table)), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": (LORA, {}),
    "full": (FULL, {"beta": 0.3}),
    "weights": (LORA, {"desirable_weight": 0.5, "undesirable_weight": 1.25, "beta": 0.2}),
}


@pytest.mark.parametrize("count", [STEPS, pytest.param(LONG_STEPS, marks=pytest.mark.torture)])
@pytest.mark.parametrize(("method", "preference"), CASES.values(), ids=CASES.keys())
def test_losses_rewards_and_weights_are_those_of_trl(
    tmp_path: Path, base: Path, method: dict[str, Any], preference: dict[str, Any], count: int
) -> None:
    spec = kto_spec(base, method, preference, train=train_of(count))
    model = started(spec)
    reference = None if method is LORA else AutoModelForCausalLM.from_pretrained(base / "base", dtype=torch.float32)
    trainer = with_trl(spec, model, tmp_path / "theirs", reference, **preference)
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    steps = of_kind(events, "step")
    assert code == 0 and len(steps) == count
    assert [step["loss"] for step in steps] == pytest.approx(trainer.seen, rel=1e-5, abs=1e-6)
    logged = [row for row in trainer.state.log_history if "kl" in row]
    names = {
        "rewards_chosen": "rewards/chosen",
        "rewards_rejected": "rewards/rejected",
        "rewards_margin": "rewards/margins",
        "logps_chosen": "logps/chosen",
        "kl": "kl",
    }
    for ours, its in names.items():
        assert [step[ours] for step in steps] == pytest.approx([row[its] for row in logged], rel=1e-5, abs=1e-5), ours
    assert max(step["kl"] for step in steps) > 0.01
    assert differing_weights(weights_of(base, place, method), trainer.model, WEIGHTS[count]) == {}


def three_steps(
    folder: Path, spec: RunSpec, rows: float, faults: Sequence[int] = ()
) -> tuple[torch.Tensor, list[StepOutcome], list[Event]]:
    """Take three steps with room for `rows` of the longest sequences; returns the trained weights, the outcomes and the
    out-of-memory events. In the third step the allocations with these numbers fail, one in each attempt."""
    workshop = Objective(spec, folder)
    with workshop as setup:
        context = setup.context
        budget_bytes = int(context.cost(1, int(context.data.lengths.max())) * rows)
        context.budget = MicroBatchBudget(budget_bytes, top_bytes=budget_bytes)
        outcomes = []
        for step in range(1, 4):
            for fault in faults if step == 3 else ():
                metered(context.device).fail_at(fault)
            outcomes.append(StepTransaction(context).run(step, setup.order.step(step)))
        vector = torch.cat([parameter.detach().flatten() for _, parameter in context.loaded.trainable()]).clone()
        return vector, outcomes, of_kind(workshop.events(), "backoff")


@pytest.fixture(scope="module")
def undisturbed(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSpec, torch.Tensor, list[StepOutcome]]:
    spec = kto_spec(base, LORA, {"sft_weight": 0.1}, device="metered", train={**SGD, "learning_rate": 0.3})
    weights, outcomes, failures = three_steps(tmp_path_factory.mktemp("undisturbed"), spec, 100)
    assert not failures and outcomes[-1].metrics["kl"] > 1e-3
    return spec, weights, outcomes


@pytest.mark.parametrize("rows", [2.5, 0.5], ids=["two sequences", "one"])
def test_no_split_changes_the_divergence_or_the_gradient(
    tmp_path: Path, undisturbed: tuple[RunSpec, torch.Tensor, list[StepOutcome]], rows: float
) -> None:
    spec, whole, together = undisturbed
    weights, outcomes, _ = three_steps(tmp_path, spec, rows)
    for found, wanted in zip(outcomes, together, strict=True):
        assert found.micro_batches > wanted.micro_batches and found.samples == wanted.samples == SGD["batch_size"]
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5)
    assert torch.allclose(weights, whole, atol=2e-6)


@pytest.mark.parametrize("fault", [3, 30, 90, 250], ids=lambda number: f"allocation {number}")
def test_a_step_that_ran_out_of_memory_learns_the_same(
    tmp_path: Path, undisturbed: tuple[RunSpec, torch.Tensor, list[StepOutcome]], fault: int
) -> None:
    """Also where the mismatched sequences of the step were measured already, or are being measured."""
    spec, whole, together = undisturbed
    weights, outcomes, failures = three_steps(tmp_path, spec, 2.5, faults=[fault])
    assert failures and outcomes[-1].metrics["kl"] == pytest.approx(together[-1].metrics["kl"], rel=1e-5)
    assert torch.allclose(weights, whole, atol=2e-6)


@pytest.mark.parametrize("method", [LORA, FULL], ids=["lora", "full"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, base: Path, method: dict[str, Any]) -> None:
    """In full fine-tuning the reference's log-probabilities, also of the mismatched sequences, are those of the
    start."""
    validation = [{"name": "held", "path": str(write_labelled(base / "held.labelled.jsonl", count=5, seed=1))}]
    source = {"name": "main", "path": str(base / "labelled.jsonl")}
    data = {"sources": [source], "validation": validation, "max_length": 96, "shuffle": True}
    steps = {**TRAIN, "max_steps": 9, "micro_batch": 1 if method is FULL else 4}
    spec = kto_spec(base, method, data=data, train=steps, checkpoint={"every_steps": 4, "every_minutes": 0})
    undisturbed, killed = (new_run(tmp_path / name, spec) for name in ("undisturbed", "killed"))
    code, events = train(undisturbed)
    process = started_until_step(killed, 6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    code_resumed, resumed = train(killed, resume=True)
    assert code == code_resumed == 0 and of_kind(resumed, "resumed")
    assert losses(resumed) == losses(events)
    expected, found = (weights_of(base, place, method) for place in (undisturbed, killed))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (score,) = [event["metrics"] for event in of_kind(events, "eval")]
    assert score.keys() == {"loss", "kl", "rewards_chosen", "rewards_rejected", "rewards_margin", *SUMS[2:]}
    ((_, scored),) = score_run(killed, None, lambda text: None)
    assert scored.metrics == pytest.approx(score, rel=1e-5, abs=1e-6)
    if method is FULL:
        pieces = sorted(piece.stem.removesuffix("-000000000") for piece in (killed.path / "reference").iterdir())
        assert pieces == ["train", "train-mismatched", "validation", "validation-mismatched"]


def test_the_loss_and_its_derivative_are_those_of_the_paper() -> None:
    drawn = np.random.default_rng(0)
    policy, reference = (torch.from_numpy(-drawn.uniform(1, 90, 40)) for _ in range(2))
    desirable = torch.from_numpy(drawn.integers(0, 2, 40) == 1)
    asked = Preference(loss="kto", beta=0.2, desirable_weight=1.3, undesirable_weight=0.6)
    found = answer_losses(policy, reference, desirable, 2.5, asked, 0.0)
    policy.requires_grad_()
    ratio = policy - reference
    good, bad = torch.sigmoid(0.2 * (ratio - 2.5)), torch.sigmoid(0.2 * (2.5 - ratio))
    wanted = torch.where(desirable, 1.3 * (1 - good), 0.6 * (1 - bad))
    (gradient,) = torch.autograd.grad(wanted.sum(), policy)
    assert torch.allclose(found.losses_S, wanted.detach(), rtol=1e-9)
    assert torch.allclose(found.weights_S, gradient, rtol=1e-7, atol=1e-12)
    assert divergence_of(-3.0, 4) == 0.0 and divergence_of(3.0, 4) == 0.75
