"""Patterns of names are checked against a model's names before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_architecture
from engine.architecture.parameters import adaptable_names, parameter_names
from engine.budget.advise.model_rules import refuse_patterns
from engine.cli import app
from engine.config.load import resolve
from engine.errors import DataError, TunedeckError, UsageError
from engine.model.adapters import fused_experts, linear_layers
from tests.budget.metered_step import GPT2, GPT_OSS, MIXTRAL, PHI3, QWEN2, QWEN3_MOE, folder_of

VISION = "model.id=Qwen/Qwen2.5-VL-3B-Instruct"


def refuse(recipe: str, *sets: str) -> None:
    spec = resolve("80gb", recipe, sets).spec
    refuse_patterns(find_architecture(spec), spec.recipe)


@pytest.mark.parametrize("family", [QWEN2, GPT2, PHI3, MIXTRAL, QWEN3_MOE, GPT_OSS], ids=lambda one: one["model_type"])
def test_the_names_are_those_of_the_model(family: dict[str, object], tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder_of(family, tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    arch = from_config(family)
    assert set(parameter_names(arch)) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(linear_layers(model)) | set(fused_experts(model)) <= set(adaptable_names(arch))


@pytest.mark.parametrize(
    ("recipe", "key", "value", "meant"),
    [
        ("lora", "method.targets", "q_prj", "q_proj"),
        ("lora", "method.exclude", "o_prj", "o_proj"),
        ("lora", "method.also_train", "lm_haed", "lm_head"),
        ("full", "method.train_only", "**.self_atn", "self_attn"),
        ("full", "method.freeze", "**.mpl", "mlp"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(recipe: str, key: str, value: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        refuse(recipe, f'{key}=["{value}"]')
    assert key in refused.value.found
    assert meant in refused.value.fix
    refuse(recipe, f'{key}=["{"**." if value.startswith("**.") else ""}{meant}"]')


def test_plan_refuses_a_misspelt_target() -> None:
    shown = CliRunner().invoke(app, ["plan", "-p", "80gb", "-r", "lora", "--set", 'method.targets=["q_prj"]'])
    assert isinstance(shown.exception, TunedeckError) and "'q_prj' does not match a name" in shown.exception.found


def test_training_only_what_sees_images_on_text_is_refused_before_loading() -> None:
    only = ['method.train_only=["model.visual"]', VISION]
    with pytest.raises(DataError, match="no trainable parameter receives a gradient from these samples"):
        refuse("full", *only)
    with pytest.raises(DataError, match="no trainable parameter"):
        refuse("lora", VISION, 'method.targets=["attn.qkv"]')
    refuse("full", *only, "data.sources.main.format=image-chat")
    refuse("full", VISION, 'method.train_only=["model.visual", "lm_head"]')
    rest = 'method.freeze=["model.language_model", "lm_head"]'
    for patterns in ([rest], ['method.train_only=["model.visual", "lm_head"]', 'method.freeze=["lm_head"]']):
        with pytest.raises(DataError, match="no trainable parameter"):
            refuse("full", VISION, *patterns)
    refuse("full", VISION, rest, "data.sources.main.format=image-chat")
    both = 'method.targets=["attn.qkv", "q_proj"]'
    refuse("lora", VISION, both)
    with pytest.raises(DataError, match="no trainable parameter"):
        refuse("lora", VISION, both, 'method.exclude=["q_proj"]')
