"""A seeded sample of `benchmarks.model_types`, its tiny configs, and the page that is written from its results."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from benchmarks.model_types import COLUMNS, saved_results
from benchmarks.type_cell import cells_of, refusal
from benchmarks.type_configs import VOCABULARY, every_type, tiny_config
from benchmarks.type_page import PAGE, group_of, refusal_of, write_page
from engine.architecture.lookup import find_config
from tests.train.run_helpers import write_samples

SAVED = saved_results()
TRIED = {name: cells for name, cells in SAVED["types"].items() if name in every_type()}
SAMPLED = 2
"""Types that the suite tries again, of those whose cells are all right."""
GOOD = sorted(name for name, cells in TRIED.items() if group_of(cells) == "good")
REFUSED = sorted(name for name, cells in TRIED.items() if group_of(cells) == "refused")
OTHER_TASKS = [name for name in REFUSED if "encoder" in refusal_of(TRIED[name])]
"""Encoders and encoder-decoders: what transformers opens as causal language models, but no text is learned with."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", random.Random(35).sample(GOOD, SAMPLED))
def test_a_type_is_trained_and_opened(tmp_path: Path, model_type: str) -> None:
    found = cells_of(model_type, tmp_path / "cell", measure=False)
    assert group_of(found) == "good", found


def test_a_type_without_a_closed_form_is_planned_and_resumed(tmp_path: Path) -> None:
    """And without gradient checkpointing, which the recipe asks for."""
    found = cells_of("ctrl", tmp_path / "cell")
    assert group_of(found) == "good", found
    assert found["plan, LoRA"]["by"] == "simulated" and found["resume"] == {"equal": True}


def test_gemma_4_e4b_is_planned_trained_packed_resumed_and_opened(tmp_path: Path) -> None:
    """With all its parts: an encoder of audio, inputs of each layer, and layers that share keys and values. On images,
    its runs are those of "gemma4" in tests/train/test_own_processor_runs.py."""
    facts = find_config("google/gemma-4-E4B-it", None)
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
        "vocab_size": 5000, "vocab_size_per_layer_input": 5000, "num_kv_shared_layers": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**small, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 64}
    audio = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
        "subsampling_conv_channels": [8, 4],
    }  # fmt: skip
    parts: dict[str, dict[str, Any]] = {"text_config": text, "vision_config": vision, "audio_config": audio}
    ids = {key: 300 + number for number, key in enumerate(sorted(facts)) if key.endswith("_token_id")}
    given = AutoConfig.for_model(**{**facts, **ids, **{name: {**facts[name], **part} for name, part in parts.items()}})
    found = cells_of("gemma4", tmp_path / "cell", given=given)
    assert group_of(found) == "good" and set(COLUMNS) <= found.keys(), found
    assert found["packing"] == {"apart": True} and found["resume"] == {"equal": True}
    assert found["gate"]["class"] == "Gemma4ForConditionalGeneration"


def test_every_type_that_is_not_trained_is_refused_by_its_config_alone(tmp_path: Path) -> None:
    """With the sentence of the page, before anything is loaded; none is found out later, and none was left out."""
    samples = write_samples(tmp_path / "samples.jsonl", count=2)
    ways = {name: "full" if "refused" in TRIED[name].get("full", {}) else "lora" for name in REFUSED}
    said = {name: refusal(_config_of(name), tmp_path / name, samples, method=way) for name, way in ways.items()}
    assert said == {name: refusal_of(TRIED[name]) for name in REFUSED}
    groups = Counter(group_of(SAVED["types"].get(name, {})) for name in SAVED["every"])
    assert groups.keys() <= {"good", "partly", "refused"}, groups
    assert groups["good"] >= 0.85 * (len(SAVED["every"]) - len(OTHER_TASKS))


def _config_of(model_type: str) -> dict[str, Any]:
    try:
        return dict(tiny_config(model_type).to_dict())
    except Exception:  # noqa: BLE001  (of any class: the gate is asked what it says of the type alone)
        return {"model_type": model_type}


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "gemma3", "qwen3_5", "mamba2"])
def test_a_tiny_config_has_one_layer_of_each_kind_and_a_large_vocabulary(model_type: str) -> None:
    tiny, default = (each.get_text_config() for each in (tiny_config(model_type), CONFIG_MAPPING[model_type]()))
    assert tiny.vocab_size == VOCABULARY and tiny.hidden_size == 64 and tiny.num_hidden_layers <= 4
    kinds = getattr(default, "layer_types", None) or [""]
    assert set(getattr(tiny, "layer_types", None) or [""]) == set(kinds)


def test_the_page_is_the_one_of_the_results_and_tells_of_every_type(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    write_page(SAVED, tmp_path / "model-types.md")
    assert (tmp_path / "model-types.md").read_text("utf-8") == text
    words = set(re.findall(r"[\w.-]+", text.replace(".\n", "\n")))
    assert set(SAVED["every"]) <= words and "Traceback" not in text
