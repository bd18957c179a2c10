"""Rules of preference learning, and what other names for it are answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.load import resolve
from engine.errors import SpecError
from tests.train.run_helpers import make_spec

DPO, KTO = "method.objective=dpo", "preference.loss=kto"

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a table without its objective": (("preference.beta=0.2",), 'method.objective = "dpo" is needed'),
    "packing": ((DPO, "data.packing=true"), 'data.packing: true with method.objective = "dpo"'),
    "dropout": ((DPO, "method.dropout=0.1"), "method.dropout: 0.1 with"),
    "another smoothing": ((DPO, "train.label_smoothing=0.1"), "train.label_smoothing: 0.1 with"),
    "prompts as targets": ((DPO, "data.loss_on=all"), "only answers have preferences"),
    "a margin of another loss": ((DPO, "preference.margin=1.0"), 'preference.loss = "simpo" is needed'),
    "a reference that nothing uses": (
        (DPO, "preference.loss=orpo", "preference.reference=precomputed"),
        'preference.loss = "dpo" or "ipo" or "kto" is needed',
    ),
    "the adapter of a full fine-tuning": (
        (DPO, "method.kind=full", "preference.reference=adapter_off"),
        '"adapter_off" with full fine-tuning',
    ),
    "rows of another format": ((DPO, "data.sources.main.format=chat"), "rows with chosen and rejected"),
    "the loss as a method": (("method.kind=simpo",), 'method.objective = "dpo" with preference.loss = "simpo"'),
    "the loss as an objective": (("method.objective=orpo",), 'preference.loss = "orpo"'),
    "one answer a step": ((DPO, KTO, "train.batch_size=1"), "2 or more is allowed"),
    "a mean over tokens": ((DPO, KTO, "preference.length_normalised=true"), 'or "orpo" is needed'),
    "a weight of labels": ((DPO, "preference.desirable_weight=2.0"), 'preference.loss = "kto" is needed'),
    "labels without their loss": (
        (DPO, "data.sources.main.format=unpaired-preference"),
        "rows with chosen and rejected",
    ),
    "chats with labels": ((DPO, KTO, "data.sources.main.format=image-chat"), "rows with prompt, completion and"),
    "shorter sequences": ((DPO, 'backoff.allow_learning_changes=["max_length"]'), "[] is allowed"),
    "a figure of texts": ((DPO, 'checkpoint.best_metric="perplexity"'), "loss, rewards_margin, rewards_accuracy"),
    "a figure of pairs": ((DPO, KTO, 'checkpoint.best_metric="win_rate"'), "one of eval.metrics: loss, rewards_margin"),
    "rewards": (("method.objective=grpo",), "training on rewards is not supported"),
    "a micro-batch above the step": ((DPO, "train.micro_batch=33"), "micro_batch = 33 is above batch_size = 16 pairs"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_pairs_cannot_be_is_refused_with_what_they_can(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve("24gb", "lora", given)
    assert words in refused.value.render()


@pytest.mark.parametrize(("kind", "rate"), [("lora", 5e-6), ("full", 1e-6)])
def test_learning_rates_are_those_of_preferences(tmp_path: Path, kind: str, rate: float) -> None:
    method: dict[str, Any] = {"kind": kind, "objective": "dpo"}
    recipe = make_spec(tmp_path / "x.jsonl", method=method, train={"learning_rate": None}).recipe
    assert recipe.train.learning_rate == rate
    assert recipe.sequences_per_step == 2 * recipe.train.batch_size


def test_the_best_checkpoint_may_be_that_of_the_rewards() -> None:
    given = (DPO, 'checkpoint.best_metric="rewards_accuracy"', 'checkpoint.result="best"', "data.valid_fraction=0.1")
    assert resolve("24gb", "lora", given).spec.recipe.checkpoint.best_metric == "rewards_accuracy"
