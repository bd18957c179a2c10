"""`tunedeck models`: the answers are those of `plan`, kept on disk, and say what is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.budget.advise import model_list
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile


def test_an_answer_is_that_of_plan(tunedeck: Tunedeck) -> None:
    [listed] = json.loads(tunedeck("models", "llama-3.2-3b", "--all", "--json").out)
    answers = {(answer["method"], answer["profile"]): answer for answer in listed["answers"]}
    assert len(answers) == 15
    plan = json.loads(
        tunedeck("plan", "-p", "24gb", "-r", "lora", "--set", f"model.id={listed['ids'][0]}", "--json").out
    )
    found = answers["LoRA", "24gb"]
    assert found["trains"] and found["micro_batch"] == plan["micro_batch"] and found["peak_bytes"] == plan["peak_bytes"]
    assert found["tokens_per_second"] == plan["time"]["tokens_per_second"]
    recomputing = ("--set", "train.gradient_checkpointing=true", "--set", "train.micro_batch=1")
    for length, verdict in ((found["longest"], "fits"), (2 * found["longest"], "fits_smaller")):
        asked = ("--set", f"model.id={listed['ids'][0]}", "--set", f"data.max_length={length}", *recomputing)
        assert json.loads(tunedeck("plan", "-p", "24gb", "-r", "lora", *asked, "--json").out)["verdict"] == verdict


def test_the_smallest_profile_without_offloads_is_the_best(tunedeck: Tunedeck) -> None:
    printed = tunedeck("models", "llama-3.1-8b").out.splitlines()
    assert printed[1].split() == [
        "llama-3.1-8b",
        *["24gb", "8k", "2,693", "24gb", "32k", "3,057", "4xh100", "64k", "-"],
    ]
    starred = tunedeck("models", "llama-3.1-8b", "-p", "80gb").out
    assert "80gb* 128k -" in starred and "*: offloads to the host" in starred


def test_what_was_found_is_kept_until_something_changes(tunedeck: Tunedeck, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tunedeck("models", "qwen2.5-1.5b").out
    with monkeypatch.context() as forbidden:
        forbidden.setattr(model_list, "make_plan", None)
        assert tunedeck("models", "qwen2.5-1.5b").out == first
        assert tunedeck("models", "qwen2.5-1.5b", "--all").code != 0
    kept = Path(os.environ["TUNEDECK_CACHE"], "models")
    for file in kept.glob("*.json"):
        file.write_text("[{")
    assert tunedeck("models", "qwen2.5-1.5b").out == first


def test_a_profile_of_ones_own(tunedeck: Tunedeck, tmp_path: Path) -> None:
    profile = write_profile(tmp_path)
    told = tunedeck("models", "qwen2.5-0.5b", "-p", profile, "--all")
    assert told.code == 0 and "here" in told.out and "it needs a CUDA device" in told.out
    profile.write_text("schema = 1\nkind = 'profile'\n")
    assert tunedeck("models", "qwen2.5-0.5b", "-p", profile).code == 2


def test_what_has_to_be_simulated_says_so(tunedeck: Tunedeck) -> None:
    told = tunedeck("models", "smollm3")
    assert (
        "?" in told.out
        and "not simulated on this machine yet" in told.out
        and "tunedeck models smollm3-3b --simulate" in told.err
    )
    too_large = tunedeck("models", "glm-5", "--all").out
    assert "weights and their gradients alone are" in too_large and "not simulated" not in too_large


def test_a_name_that_no_model_has(tunedeck: Tunedeck) -> None:
    told = tunedeck("models", "no-such-model")
    assert told.code == 2 and "model.id=OWNER/NAME" in told.err
