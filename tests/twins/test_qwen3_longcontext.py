"""The twin of qwen3-4b-longcontext: four devices share a sequence that one or two of them cannot hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from engine.budget.advise.plan import make_plan
from engine.budget.predict.inference import generates
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.evaluate.run import score_run
from engine.journal.evaluations import read_evaluations
from engine.journal.events import Journal
from engine.train.run.setup import set_up
from engine.train.step.failures import RecoveredOom
from engine.train.step.transaction import StepTransaction
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import NEEDS_SHARDS
from tests.train.run_helpers import new_run, of_kind, train
from tests.twins.twin import twin, write_model

RECIPE, STEPS, RANKS = "qwen3-4b-longcontext", 5, 4
TIGHT_GIB = 0.003
"""Memory of a device: a quarter of the longest sequence fits, half of it does not."""
LETTERS = 1900
"""In the longest answers, with which a sequence has nearly the 2048 tokens of the twin."""
SUMMARIES = ["a b a b a b a b", "b a b a b a b a"]
"""Short answers, whose letters the model learns within a few steps."""
SHORT = (
    "train.max_steps=16",
    "train.epochs=8",
    "train.batch_size=8",
    "train.learning_rate=0.05",
    "checkpoint.every_steps=8",
    "eval.every_steps=8",
    "data.valid_fraction=0.2",
    "generate.max_new_tokens=16",
)
"""Settings with which two checkpoints are written of a model that has learned some of SUMMARIES."""
EXACT = ("model.dtype=float32", "trackers.use=[]")
"""In bf16 the order of sums shows in the loss; trackers are packages of others."""


def on_devices(folder: Path, count: int, *sets: str, memory_gib: float = TIGHT_GIB) -> RunSpec:
    """The run spec of the twin on `count` devices."""
    return twin(RECIPE, folder, *EXACT, *sets, memory_gib=memory_gib, count=count)


def first_steps(spec: RunSpec, ranks: Ranks) -> dict[str, Any]:
    """Take the run's steps; returns their losses, the highest peak in bytes, and the remedies for failures."""
    told: list[RecoveredOom] = []
    device = open_device(spec)
    with device.activate():
        setup = set_up(spec, device, Journal(None), told.append, ranks)
        transaction = StepTransaction(setup.context)
        outcomes, peaks = [], []
        for step in range(1, STEPS + 1):
            outcomes.append(transaction.run(step, setup.order.step(step)))
            peaks.append(transaction.work.peak_bytes)
    remedies = [each.remedy for each in told]
    return {"losses": [outcome.loss for outcome in outcomes], "peak_bytes": max(peaks), "remedies": remedies}


def shared(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The steps of one of four ranks."""
    return first_steps(on_devices(folder, RANKS), ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, drawn = tmp_path_factory.mktemp("long"), random.Random(1)
    write_model(folder / "model", "qwen3", torch.float32, layers=1)
    rows = []
    for number in range(36):
        rows.append("".join(drawn.choices("abcdefgh ", k=LETTERS if number % 18 == 0 else drawn.randint(20, 90))))
    write_answers(folder, rows)
    return folder


def write_answers(folder: Path, answers: list[str]) -> None:
    """Write the recipe's data file: a conversation with one question, the same in all, for each of `answers`."""
    rows = [[{"role": "user", "content": "Sum up."}, {"role": "assistant", "content": text}] for text in answers]
    (folder / "summaries.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def test_the_longest_sequence_fits_four_devices_and_two_in_pieces_alone(folder: Path) -> None:
    sharing = {4: on_devices(folder, 4), 2: on_devices(folder, 2, "parallel.sequence=2"), 1: on_devices(folder, 1)}
    plans = {count: make_plan(spec) for count, spec in sharing.items()}
    verdicts = {count: plan.verdict for count, plan in plans.items()}
    assert verdicts == {4: "fits", 2: "fits_smaller", 1: "does_not_fit"}
    assert plans[2].remedies["train.mlp_tiles"] > 1


def test_nothing_is_generated_inside_training(folder: Path) -> None:
    recipe = on_devices(folder, RANKS).recipe
    assert "rouge" in recipe.evaluate.metrics and not generates(recipe)


@NEEDS_SHARDS
def test_four_devices_that_share_it_have_the_losses_of_one_with_room(folder: Path) -> None:
    alone = first_steps(on_devices(folder, 1, memory_gib=1.0), SINGLE_PROCESS)
    found = run_ranks([shared], folder, size=RANKS)["shared"]
    for rank in found:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["peak_bytes"] <= TIGHT_GIB * 2**30 < alone["peak_bytes"]
    assert alone["remedies"] == [] and all(rank["remedies"] == [] for rank in found)


def test_each_checkpoint_has_one_row_of_rouge_as_the_package_computes_it_from_the_stored_answers(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model", "qwen3", torch.float32, layers=1)
    write_answers(tmp_path, SUMMARIES * 10)
    run = new_run(tmp_path / "runs", on_devices(tmp_path, 1, *SHORT, memory_gib=1.0))
    code, events = train(run)
    assert code == 0 and all(not event.get("samples") for event in of_kind(events, "eval"))
    score_run(run, "all", lambda text: None)
    scored = read_evaluations(run)
    assert [each.step for each in scored] == [8, 16]
    package = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    for each in scored:
        assert len(each.samples) == each.count == 4
        found = [package.score(sample["reference"], sample["answer"]) for sample in each.samples]
        for metric in ("rouge1", "rouge2", "rougeL"):
            expected = sum(scores[metric].fmeasure for scores in found) / each.count
            assert each.metrics[metric] == pytest.approx(expected, abs=1e-12)
    assert scored[-1].metrics["rougeL"] > 0.1, "the answers have words in common with their references"
