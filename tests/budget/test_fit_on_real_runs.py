"""Tests `advise` on small runs that do not fit: with the first suggestion, a run on the metered device succeeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.advise.search import Advice, advise
from engine.budget.predict.prediction import predict
from engine.config.changes import with_changes
from engine.config.schema.run import RunSpec
from tests.budget.budget_cases import FAMILIES, FULL, KEEPING, LORA, SAVING
from tests.budget.capacity_runs import texts
from tests.budget.metered_step import folder_of
from tests.train.run_helpers import new_run, of_kind, train

ROWS, LENGTH = 4, 300


@dataclass(frozen=True)
class Twin:
    """A small run, and its memory as a share of its predicted peak (`share`)."""

    family: str
    share: float
    method: dict[str, Any]
    train: dict[str, Any]
    micro_batch: int | str = ROWS
    wide: dict[str, Any] = field(default_factory=dict)
    """Dimensions of the model that make one component large."""

    def __str__(self) -> str:
        return f"{self.family}, {self.share} of {self.method.get('kind', 'lora')}"


TWINS = [
    Twin("qwen2", 0.8, LORA, KEEPING),
    Twin("llama", 0.5, LORA, KEEPING),
    Twin("qwen3", 0.8, FULL, {**KEEPING, "loss": "plain"}),
    Twin("mistral", 0.6, FULL, KEEPING, micro_batch=1),
    Twin("gemma2", 0.7, LORA, SAVING),
    Twin("gemma3_text", 0.5, FULL, KEEPING),
    Twin("phi3", 0.75, {"rank": 8, "dora": True}, KEEPING),
    Twin("mixtral", 0.6, {"rank": 4, "targets": "attention"}, KEEPING),
    Twin("qwen3_moe", 0.7, LORA, KEEPING, micro_batch=1),
    Twin("qwen2", 0.35, FULL, {**SAVING, "loss": "plain"}, wide={"vocab_size": 6000}),
]


SAMPLE = ("qwen2, 0.8", "qwen3, ", "mistral, ", "phi3, ", "mixtral, ")
"""Twins of `make test`: for each another first suggestion, or another way to count. `make torture` tries all."""


@pytest.mark.parametrize(
    "twin",
    [twin if str(twin).startswith(SAMPLE) else pytest.param(twin, marks=pytest.mark.torture) for twin in TWINS],
    ids=str,
)
def test_the_first_suggestion_applied_fits(twin: Twin, tmp_path: Path) -> None:
    roomy = spec_of(twin, tmp_path, 2**33)
    rows = twin.micro_batch if isinstance(twin.micro_batch, int) else ROWS
    needs_bytes = predict(find_architecture(roomy), roomy, rows=rows, length=LENGTH).peak_bytes
    tight = spec_of(twin, tmp_path, twin.share * needs_bytes)
    before = failures(tight, tmp_path / "before")
    advice = advise(tight)
    assert advice.plan.verdict != "fits"
    assert before > 0
    assert failures(changed(tight, advice), tmp_path / "after") == 0


def changed(spec: RunSpec, advice: Advice) -> RunSpec:
    """The run spec with the changes of the first suggestion."""
    return with_changes(spec, {key: after for key, (_, after) in advice.suggestions[0].changes.items()})


def failures(spec: RunSpec, runs: Path) -> int:
    """Run two steps, and return how often the run backed off. The run's ladder allows only smaller micro-batches."""
    code, events = train(new_run(runs, spec))
    assert code in (0, 4)
    return len(of_kind(events, "backoff"))


def spec_of(twin: Twin, folder: Path, capacity_bytes: float) -> RunSpec:
    """The run spec of a twin on a device of `capacity_bytes`: two steps of two micro-batches over texts of one
    length."""
    recipe = {
        "name": "twin",
        "model": {
            "id": str(folder_of({**FAMILIES[twin.family], **twin.wide}, folder / "model")),
            "tokenizer": "builtin:bytes", "init": "random", "dtype": "float32",
        },
        "method": twin.method,
        "data": {"sources": [{"name": "main", "path": str(texts(folder, 4 * ROWS, LENGTH))}], "max_length": LENGTH},
        "train": {"max_steps": 2, "batch_size": 2 * ROWS, "micro_batch": twin.micro_batch, **twin.train},
        "backoff": {"ladder": ["cut"]},
        "checkpoint": {"every_minutes": 0},
    }  # fmt: skip
    device = {"kind": "metered", "memory_gib": capacity_bytes / 2**30}
    return RunSpec.model_validate({"name": "twin", "profile": {"name": "twin", "device": device}, "recipe": recipe})
