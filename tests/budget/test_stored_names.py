"""A base whose files belong to another model, and tensors that are not trained, from the headers of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.type_cell import write_tiny
from benchmarks.type_configs import tiny_config
from engine.checks.run import CHECK, check_run, problems_of_run
from engine.config.schema.run import RunSpec
from tests.model.samples import FAMILIES, run_spec, write_model

LONG = {"max_position_embeddings": 4096}


def with_tensor(base: Path, name: str, *shape: int) -> RunSpec:
    file = base / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(*shape)}, file, metadata={"format": "pt"})
    return run_spec(str(base))


def _notes(spec: RunSpec) -> list[str]:
    return [note for note in check_run(spec, CHECK).reported if "not trained" in note]


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (32,), "self_attn.q_proj has no bias"),
        ("model.layers.2.mlp.up_proj.weight", (48, 32), "a layer behind the last of 2"),
        ("model.layers.1.mlp.up_proj.weight", (40, 32), "it is [40, 32], and [48, 32] there"),
    ],
)
def test_weights_of_another_model_are_reported_before_a_run(
    tmp_path: Path, name: str, shape: tuple[int, ...], reason: str
) -> None:
    spec = with_tensor(write_model(tmp_path / "base", "llama", **LONG), name, *shape)
    [problem] = problems_of_run(spec)
    assert reason in problem and "belong to another model" in problem


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_sound_base_is_refused_or_noted(tmp_path: Path, family: str) -> None:
    spec = run_spec(str(write_model(tmp_path / "base", family, **LONG)))
    assert problems_of_run(spec) == [] and _notes(spec) == []


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl", "qwen2_5_vl", "mistral3", "olmo3", "qwen2_moe"])
def test_no_sound_base_of_transformers_is_refused(tmp_path: Path, kind: str) -> None:
    write_tiny(tiny_config(kind), tmp_path / "base")
    problems = problems_of_run(run_spec(str(tmp_path / "base"), tokenizer="builtin:bytes"))
    assert not any("another model" in each for each in problems)


def test_layers_that_predict_further_tokens_are_noted(tmp_path: Path) -> None:
    spec = with_tensor(write_model(tmp_path / "base", "llama", **LONG), "mtp.fc.weight", 4, 4)
    [note] = _notes(spec)
    assert "1 tensors for multi-token prediction, such as mtp.fc.weight, are not trained" in note
    config = tmp_path / "other" / "config.json"
    spec = with_tensor(write_model(tmp_path / "other", "llama", **LONG), "model.layers.2.mlp.up_proj.weight", 48, 32)
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    assert problems_of_run(spec) == [] and "model.layers.2" in _notes(spec)[0]
