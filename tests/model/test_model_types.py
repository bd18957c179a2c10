"""A seeded sample of `benchmarks.model_types`, its tiny configs, and the page that is written from its results."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.model_types import saved_results
from benchmarks.type_cell import cells_of
from benchmarks.type_configs import VOCABULARY, every_type, tiny_config
from benchmarks.type_page import PAGE, group_of, write_page

SAVED = saved_results()
TRIED = {name: cells for name, cells in SAVED["types"].items() if name in every_type()}
SAMPLED = 2
"""Types that the suite tries again, of those whose cells are all right, and of those refused."""
GOOD = sorted(name for name, cells in TRIED.items() if group_of(cells) == "good")
REFUSED = sorted(name for name, cells in TRIED.items() if group_of(cells) == "refused")


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


@pytest.mark.parametrize("model_type", random.Random(35).sample(REFUSED, SAMPLED))
def test_a_type_that_cannot_be_trained_is_refused_by_its_files(tmp_path: Path, model_type: str) -> None:
    assert group_of(cells_of(model_type, tmp_path / "cell")) == "refused"


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
