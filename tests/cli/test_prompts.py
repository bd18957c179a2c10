"""`eval.prompts`: answered at every evaluation, from the recipe or from a file, and refused early if it has none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Tunedeck

SETS = ("train.max_steps=2", "train.warmup_steps=0", "eval.every_steps=1", "eval.limit=2", "generate.max_new_tokens=4",
        "eval.samples=1", "eval.metrics=[\"loss\"]", "checkpoint.every_steps=2")  # fmt: skip


def test_prompts_of_a_file_are_answered_at_every_evaluation(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("3 May 2021 ->\n\nhello\n")
    sets = [part for text in (*SETS, "eval.prompts=asked.txt") for part in ("--set", text)]
    trained = tunedeck("train", "-p", "demo", "-r", "demo", *sets)
    assert trained.code == 0, trained.err
    (events,) = (tmp_path / "runs").glob("*/events.jsonl")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    evals = [event for event in found if event["kind"] == "eval" and event["step"]]
    assert [event["step"] for event in evals] == [1, 2]
    for event in evals:
        own = [sample for sample in event["samples"] if "reference" not in sample]
        assert [sample["prompt"] for sample in own] == ["3 May 2021 ->", "hello"]
        assert len(event["samples"]) == 3 and all(isinstance(sample["answer"], str) for sample in own)


def test_a_file_without_prompts_is_refused_before_there_is_a_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    tunedeck("train", "-p", "demo", "-r", "demo", "--set", "eval.prompts=no.txt").complains(5, "no.txt", "eval.prompts")
    (tmp_path / "empty.txt").write_text("\n")
    tunedeck("train", "-p", "demo", "-r", "demo", "--set", "eval.prompts=empty.txt").complains(
        5, "the file has no prompts"
    )
    assert not list((tmp_path / "runs").glob("2*"))
