"""Fixes for memory that runs out where no smaller micro-batch helps: inside the optimizer's step, and in an evaluation
of one sample."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TunedeckError
from engine.train.step import optimizer
from engine.train.step.transaction import CheckpointReloadRequired, StepTransaction
from tests.evaluate.test_scoring import score_under
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.model.samples import write_model
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

WALKED = (
    "train/run/loop:_reload_last: set {LEANER}", "train/run/loop:_reload_last: start again with {LEANER}",
    "evaluate/context:retries_unchanged",
)  # fmt: skip
"""The fix texts that the tests below execute."""

MIB = 1 / 1024
TIGHT_GIB = 28 * MIB
"""Backward fits, the update of the largest weight does not: 12 MiB of weights, 12 of gradients, 4 of an update."""
LEANER: list[dict[str, Any]] = [{"method": {"kind": "lora"}}, {"train": {"optimizer": "sgd"}}]
"""The recipe's tables as the fixes say."""


def one_large_layer(folder: Path) -> dict[str, Any]:
    """Tables of a recipe of one micro-batch a step, of whose model no copy is taken before an update."""
    sizes = {"hidden_size": 128, "intermediate_size": 8192, "num_hidden_layers": 1}
    few = {"max_steps": 1, "batch_size": 1, "micro_batch": 1, "learning_rate": 1e-3, "optimizer": "adafactor"}
    model = write_model(folder / "model", "llama", **sizes)
    return {"model": {"id": str(model), "init": "pretrained"}, "method": {"kind": "full"}, "train": few}


def outcome(folder: Path, tables: dict[str, Any], more: dict[str, Any]) -> tuple[int, str]:
    merged: Any = {name: {**tables.get(name, {}), **more.get(name, {})} for name in {*tables, *more}}
    samples = write_samples(folder / "rows.jsonl", count=16, longest=12)
    code, events = train(new_run(folder / "runs", make_spec(samples, memory_gib=TIGHT_GIB, **merged)))
    return code, str(of_kind(events, "run_finished")[-1].get("error") or "")


def test_an_update_that_does_not_fit_is_left_out_by_what_the_fix_names(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the fix named adamw, whose state needs far more than the update of adafactor that did not fit."""
    monkeypatch.setattr(optimizer, "SNAPSHOT_LIMIT_BYTES", 0)
    tables = one_large_layer(tmp_path)
    code, error = outcome(tmp_path, tables, {})
    assert code == 4 and "3 times in a row" in error, error
    assert was_given(text_of("train/run/loop:_reload_last: set {LEANER}"), given), given
    given.clear()
    assert [outcome(tmp_path, tables, right)[0] for right in LEANER] == [0, 0]
    assert not given


def test_a_run_without_a_checkpoint_starts_again_as_the_fix_says(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "SNAPSHOT_LIMIT_BYTES", 0)
    run = StepTransaction.run

    def removed(self: StepTransaction, *arguments: Any) -> Any:
        """As if the checkpoints were removed while the run trains."""
        try:
            return run(self, *arguments)
        except CheckpointReloadRequired:
            for folder in tmp_path.glob("runs/*/checkpoints"):
                shutil.rmtree(folder)
            raise

    monkeypatch.setattr(StepTransaction, "run", removed)
    tables = one_large_layer(tmp_path)
    code, error = outcome(tmp_path, tables, {})
    assert code == 4 and "no checkpoint to go back to" in error, error
    assert was_given(text_of("train/run/loop:_reload_last: start again with {LEANER}"), given), given
    assert [outcome(tmp_path, tables, right)[0] for right in LEANER] == [0, 0]


LONG = {"length": 64, "answer": 4, "memory_gib": 3.5 * MIB}
"""The loss of one sample does not fit."""
TALKATIVE = {"length": 16, "answer": 200, "memory_gib": 3.6 * MIB}
"""The generation of one answer does not fit."""


def score(folder: Path, *, length: int, answer: int, memory_gib: float) -> list[str]:
    """The phases in which memory ran out and that went on."""
    samples = folder / "rows.jsonl"
    samples.write_text('{"prompt": "say a ", "completion": "' + "ab " * 20 + '"}\n{"prompt": "b", "completion": "c"}\n')
    data = {"max_length": length, "over_length": "truncate", "valid_fraction": 0.5}
    spec = make_spec(samples, memory_gib=memory_gib, data=data, generate={"max_new_tokens": answer})
    return score_under(spec)[1]


@pytest.mark.parametrize(("wrong", "key", "less"), [(LONG, "length", 16), (TALKATIVE, "answer", 4)], ids=str)
def test_a_sample_that_cannot_be_evaluated_can_with_the_keys_that_the_fix_names(
    wrong: dict[str, Any], key: str, less: int, tmp_path: Path, given: Given
) -> None:
    with pytest.raises(TunedeckError, match="with one sample at a time") as refused:
        score(tmp_path, **wrong)
    assert was_given(text_of("evaluate/context:retries_unchanged"), given), given
    assert {"length": "data.max_length", "answer": "generate.max_new_tokens"}[key] in refused.value.fix
    assert score(tmp_path, **{**wrong, key: less}) == []
    assert score(tmp_path, **{**wrong, "memory_gib": 8 * MIB}) == []
