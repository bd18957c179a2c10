"""Scoring: its own backoff, what an interrupted scoring keeps, scores of labels, gains over a reference."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batching.budget import MicroBatchBudget
from engine.config.load import load_run_spec
from engine.data.prepare import prepare_data
from engine.device.open import open_device
from engine.errors import MemoryExhaustedError, UsageError
from engine.evaluate.answers import KeptAnswers, KeptLosses, planned_rows
from engine.evaluate.context import EvaluationContext, FailedPass
from engine.evaluate.metrics import score_labels
from engine.evaluate.run import score_model, score_run
from engine.evaluate.scores import Scores, evaluate
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import read_evaluations, values_of
from engine.model.load import load_model
from engine.model.loss import make_loss
from engine.model.tokenizer import load_tokenizer
from tests.events import read_events
from tests.present import present
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

METRICS = ["loss", "exact_match", "token_f1"]
EVALUATE = {"metrics": METRICS, "log_samples": 2}


def score_under(spec: Any, *, rows: int | None = None) -> tuple[Scores, list[str]]:
    """The scores of a run spec's model on its validation data, and the phases in which memory ran out. `rows` is the
    number of answers to start with; None: as many as are predicted to fit."""
    device = open_device(spec)
    failures: list[str] = []

    def report(failed: FailedPass, *_: object) -> None:
        failures.append(failed.failure.phase)

    with device.activate():
        tokenizer = load_tokenizer(spec.recipe.model)
        with device.host_region():
            data = present(prepare_data(spec, tokenizer).validation)
        loaded = load_model(spec, device, tokenizer)
        loss = make_loss(loaded, implementation="plain", label_smoothing=0.0, chunk_tokens=None, device=device)
        rule = planned_rows(spec, device) if rows is None else lambda prompt: rows
        context = EvaluationContext(
            device, loaded, loss, lambda rows, length, patches=None: rows * length * 4000,
            MicroBatchBudget(10**9, 10**9), spec.recipe.generate, report, planned_rows=rule,
        )  # fmt: skip
        scores = evaluate(context, data, METRICS, limit=None, samples=2)
    return scores, failures


def test_scores_under_a_cap_that_forces_backoff_equal_those_without(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "rows.jsonl", count=60)
    tables: dict[str, Any] = {"data": {"valid_fraction": 0.6}, "generate": {"max_new_tokens": 6, "temperature": 1.0}}
    free, none = score_under(make_spec(samples, **tables), rows=64)
    capped, failures = score_under(make_spec(samples, memory_gib=0.004, **tables), rows=64)
    assert none == [] and {"generate", "evaluate"} <= set(failures)
    assert capped.samples == free.samples and capped.values == free.values
    assert capped.metrics == pytest.approx(free.metrics, rel=1e-5)
    planned, fewer = score_under(make_spec(samples, memory_gib=0.004, **tables))
    assert "generate" not in fewer, "the number of answers that starts from free memory fits"
    assert planned.values == free.values


KILLED_AFTER = """
import os, signal, sys
from pathlib import Path
from engine.evaluate import answers
from engine.evaluate.run import score_model, score_run
from engine.journal.directory import RunDirectory
from engine.evaluate import context
limit, written, append = int(sys.argv[2]), [0], answers.append_rows
context.GENERATION_ROWS = 4

def killed(path, rows):
    append(path, rows)
    written[0] += 1
    if written[0] == limit:
        with path.open("ab") as file:
            file.write(b'{"sample": 1, "ans')
        os.kill(os.getpid(), signal.SIGKILL)

answers.append_rows = killed
score_run(RunDirectory(Path(sys.argv[1])), "all", lambda text: None, base=True)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("scored")
    spec = make_spec(
        write_samples(folder / "rows.jsonl", count=40), data={"valid_fraction": 0.5}, evaluate=EVALUATE,
        train={"max_steps": 2}, checkpoint={"every_steps": 1, "every_minutes": 0}, generate={"max_new_tokens": 6},
    )  # fmt: skip
    run = new_run(folder / "runs", spec)
    code, _ = train(run)
    assert code == 0
    return run


def lines_of(run: RunDirectory, kind: str) -> list[tuple[str, int]]:
    """The name of the file and the number of the sample, for each sample in the kept files of a kind."""
    found: list[tuple[str, int]] = []
    for path in sorted(run.kept_scores.glob(f"{kind}-*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found += [(path.name, sample) for sample in row.get("samples", [row.get("sample")])]
    return found


def test_a_killed_scoring_goes_on_and_scores_nothing_twice(trained: RunDirectory) -> None:
    command = [sys.executable, "-P", "-c", KILLED_AFTER, str(trained.path), "5"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    kept_before = lines_of(trained, "losses") + lines_of(trained, "answers")
    assert kept_before
    again = score_run(trained, "all", lambda text: None, base=True)
    for kind in ("losses", "answers"):
        samples = lines_of(trained, kind)
        assert len(samples) == len(set(samples)) == 3 * 20, "three models, 20 samples each"
    for path in trained.kept_scores.glob("*.jsonl"):
        path.unlink()
    fresh = score_run(trained, "all", lambda text: None, base=True)
    assert [step for step, _ in again] == [step for step, _ in fresh] == [0, 1, 2]
    for (_, one), (_, other) in zip(again, fresh, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-6)
        assert (one.samples, one.values, one.count) == (other.samples, other.values, other.count)


def test_scores_are_recorded_and_a_later_one_of_the_same_key_replaces(trained: RunDirectory) -> None:
    ((step, scores),) = score_run(trained, None, lambda text: None, overrides=["evaluate.limit=7"])
    score_run(trained, None, lambda text: None, overrides=["evaluate.limit=7", 'evaluate.metrics=["rouge"]'])
    assert len(trained.evaluations.read_text().splitlines()) >= 2
    (found,) = [each for each in read_evaluations(trained) if each.count == 7]
    assert (found.step, step) == (2, 2)
    assert found.metrics.items() >= {"rouge1": 0.0}.items() and found.metrics["loss"] == scores.metrics["loss"]
    assert present(values_of(trained, found, "token_f1")) == scores.values["token_f1"]
    trained.evaluations.write_text(trained.evaluations.read_text() + '{"torn')
    score_run(trained, None, lambda text: None, overrides=["evaluate.limit=7"])
    assert len([each for each in read_evaluations(trained) if each.count == 7]) == 1


def test_a_stage_is_scored_with_other_settings_though_its_name_has_a_slash(
    trained: RunDirectory, tmp_path: Path
) -> None:
    stage = RunDirectory(Path(shutil.copytree(trained.path, tmp_path / "01-stage")))
    stage.run_toml.write_text(stage.run_toml.read_text().replace('name = "small"', 'name = "run/stage"', 1))
    assert load_run_spec(stage.run_toml).name == "run/stage"
    ((_, scores),) = score_run(stage, None, lambda text: None, overrides=["evaluate.limit=3"])
    assert scores.count == 3


def test_a_run_is_not_scored_with_other_training_settings(trained: RunDirectory) -> None:
    with pytest.raises(UsageError, match=r"train\.seed"):
        score_run(trained, None, lambda text: None, overrides=["train.seed=1"])


def test_a_run_is_scored_on_a_file_that_it_did_not_hold_out(trained: RunDirectory, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n')
    other = f'data.validation=[{{name="held", path="{held}"}}]'
    ((_, scores),) = score_run(trained, None, lambda text: None, overrides=[other])
    assert scores.count == 2


def test_a_users_own_scorer_gets_all_answers_and_references(trained: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def lengths(answers, references):\n    return {'pairs': len(list(zip(answers, references)))}\n")
    ((_, scores),) = score_run(trained, None, lambda text: None, scorer=f"{file}:lengths")
    assert scores.metrics["pairs"] == 20
    for wrong in (f"{file}:missing", f"{tmp_path}/none.py:f", "mine"):
        with pytest.raises(UsageError, match="scorer"):
            score_run(trained, None, lambda text: None, scorer=wrong)


def test_accuracy_and_the_scores_of_each_class_equal_their_definition() -> None:
    drawn = random.Random(5)
    for _ in range(50):
        references = drawn.choices(["yes", "no", "maybe"], k=drawn.randint(1, 30))
        answers = drawn.choices(["yes", "no", "maybe", "I do not know"], k=len(references))
        pairs = list(zip(answers, references, strict=True))
        classes, means = score_labels(answers, references)
        assert list(classes) == sorted(set(references))
        for label, row in classes.items():
            hits = sum(one == other == label for one, other in pairs)
            given, wanted = answers.count(label), references.count(label)
            precision, recall = hits / given if given else 0.0, hits / wanted
            f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
            assert row == pytest.approx({"precision": precision, "recall": recall, "f1": f1, "count": wanted})
        assert means["macro_f1"] == pytest.approx(sum(row["f1"] for row in classes.values()) / len(classes))


def test_kept_results_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    KeptAnswers(path).add({3: "a", 4: "b\n"})
    path.write_bytes(path.read_bytes() + b'{"sample": 5, "ans')
    KeptAnswers(path).add({6: "c"})
    assert KeptAnswers(path).texts == {3: "a", 4: "b\n", 6: "c"}
    losses = KeptLosses(tmp_path / "losses.jsonl")
    losses.add([0, 2], 1.5)
    losses.add([1, 9], 2.5)
    assert KeptLosses(tmp_path / "losses.jsonl").among(np.arange(5)) == {(0, 2): 1.5}


def test_training_records_the_same_scores_as_scoring_afterwards(trained: RunDirectory) -> None:
    spec = load_run_spec(trained.run_toml)
    recorded = of_kind(list(read_events(trained.events)), "eval")[-1]["metrics"]["loss"]
    ((_, scores),) = score_run(trained, None, lambda text: None)
    assert spec.recipe.eval.metrics == ["loss"] and scores.metrics["loss"] == pytest.approx(recorded, rel=1e-5)


def test_a_model_that_never_fits_ends_with_what_to_do(tmp_path: Path) -> None:
    held: dict[str, Any] = {"data": {"valid_fraction": 0.2}}
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), memory_gib=0.0001, **held)
    said: list[str] = []
    with pytest.raises(MemoryExhaustedError, match="out of memory in load") as ended:
        score_model(spec, said.append)
    assert "a profile with more memory" in str(ended.value.fix)
    assert [text for text in said if text.startswith("out of memory")] == [
        "out of memory while loading model: retry 1",
        "out of memory while loading model: retry 2",
        "out of memory while loading model: give_up 3",
    ]
