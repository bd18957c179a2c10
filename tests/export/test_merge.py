"""Merging: the merged model gives the same answers without peft; no half-written result remains; too little memory is
reported before anything is loaded."""

from __future__ import annotations

import shlex
import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.commands.export import merge as merge_command
from engine.errors import MemoryExhaustedError, UsageError
from engine.export.merge import merge
from engine.journal.directory import RunDirectory
from tests.train.run_helpers import make_spec, new_run, train, write_samples


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    samples = write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl")
    spec = make_spec(samples, method={"kind": "lora"}, train={"max_steps": 3, "learning_rate": 0.05})
    place = new_run(tmp_path_factory.mktemp("runs"), spec)
    assert train(place)[0] == 0
    return place


def test_the_merged_model_answers_as_adapter_and_base_did(finished: RunDirectory, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    size_bytes = merge(finished.adapter, target, lambda text: None)
    base = AutoModelForCausalLM.from_pretrained(finished.adapter / "base")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(finished.adapter))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(target)(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, plain, atol=1e-3)
    assert size_bytes > (finished.adapter / "base" / "model.safetensors").stat().st_size
    assert (target / "tokenizer.json").is_file()


def test_a_target_that_exists_is_left_alone(finished: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        merge(finished.adapter, tmp_path, lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_full_model_needs_no_merging(finished: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no adapter"):
        merge(finished.adapter / "base", tmp_path / "merged", lambda text: None)


def test_too_little_memory_is_told_before_anything_is_loaded(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory = namedtuple("Memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(2**30, 2**10))
    said: list[str] = []
    with pytest.raises(MemoryExhaustedError, match="host memory"):
        merge(finished.adapter, tmp_path / "merged", said.append)
    assert not said and not list(tmp_path.iterdir())


def test_without_a_result_the_fix_merges_the_newest_checkpoint(finished: RunDirectory, tmp_path: Path) -> None:
    unfinished = tmp_path / "runs" / finished.name
    shutil.copytree(finished.path, unfinished)
    shutil.rmtree(unfinished / "adapter")
    for checkpoint in (None, "77"):
        with pytest.raises(UsageError, match="no result yet" if checkpoint is None else "no checkpoint 77") as caught:
            merge_command(str(unfinished), checkpoint=checkpoint)
        words = shlex.split(caught.value.fix)
        assert words[:4] == ["tunedeck", "merge", str(unfinished), "--checkpoint"] and len(words) == 5
    merge_command(str(unfinished), checkpoint=words[4])
    assert (unfinished / "merged" / "model.safetensors").is_file()
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UsageError, match="no result yet") as caught:
        merge_command(str(unfinished))
    assert caught.value.fix == f"tunedeck resume {unfinished}"
