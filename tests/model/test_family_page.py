"""A sample of `benchmarks.families`, and the page that is written from all of its results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.families import RESULTS
from benchmarks.family_cell import refused, trained
from benchmarks.family_configs import REFUSED, TRAINED
from benchmarks.family_page import PAGE, write_page

LEAST = 45
"""Families that the page must have trained."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "method", "plan"),
    [
        ("gpt2", "lora", "closed_form"), ("mixtral", "full", "closed_form"),
        ("granite", "full", "simulated"), ("mamba", "full", "simulated"),
    ],
)  # fmt: skip
def test_a_family_is_planned_trained_and_opened(tmp_path: Path, family: str, method: str, plan: str) -> None:
    found = trained(family, TRAINED[family], method, tmp_path / "cell")
    assert found.get("plan") == plan, found


@pytest.mark.parametrize(("family", "words"), [("t5", "encoder-decoder"), ("internlm2", "--trust-remote-code")])
def test_a_family_that_cannot_be_trained_is_refused_in_a_sentence(tmp_path: Path, family: str, words: str) -> None:
    assert words in refused(family, REFUSED[family], "lora", tmp_path / "cell")["refused"]


def test_the_page_is_the_one_of_the_results_and_has_no_gap(tmp_path: Path) -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    assert set(results) <= {*TRAINED, *REFUSED} and not [name for name in results if "failed" in str(results[name])]
    text = PAGE.read_text("utf-8")
    write_page(results, tmp_path / "families.md")
    versions = re.compile(r"with transformers .*? and torch [^,]*,")
    assert versions.sub("", (tmp_path / "families.md").read_text("utf-8")) == versions.sub("", text)
    rows = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert all(all(row) for row in rows) and "Traceback" not in text and "unexpected" not in text
    assert len({row[0] for row in rows if row[1:2] in (["LoRA"], ["full"])}) >= LEAST
