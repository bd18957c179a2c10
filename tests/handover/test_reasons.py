"""What keeps an adapter from being served as it is, each shown by a run that leaves such an adapter; what no run of
ours can leave, by an adapter made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from engine.budget.advise.preflight import notes_on_serving
from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.errors import UsageError
from engine.extras.handover.result import (
    ADAPTER_WEIGHTS,
    Result,
    read_result,
    reasons_of_server,
    reasons_to_merge,
    server_words,
    tensor_names,
    unknown_modules,
)
from engine.journal.files import read_table
from engine.model.config import auto_class
from tests.model.samples import load, name_base, run_spec, write_model
from tests.nested_models import NESTED
from tests.train.image_cases import image_spec
from tests.train.run_helpers import make_spec, new_run, train, write_samples

EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]

REASONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dora": ("qwen2", {"dora": True}, "DoRA"),
    "a large rank": ("qwen2", {"rank": 600, "targets": ["q_proj"]}, "rank 600: vLLM supports at most 512"),
    "the head": ("qwen2", {"also_train": ["lm_head.weight"]}, "trained in full: lm_head"),
    "a norm": ("qwen2", {"also_train": ["model.norm.weight"]}, "trained in full: model.norm"),
    "embeddings": ("qwen2", {"also_train": ["model.embed_tokens.weight"]}, "trained in full: model.embed_tokens"),
    "a router": ("mixtral", {"targets": ["q_proj"], "also_train": ["**.gate.weight"]}, "in full: model.layers.0"),
    "experts": ("mixtral", {"targets": EXPERTS, "rank": 2}, "adapters on experts"),
}


def saved_adapter(folder: Path, family: str, method: dict[str, Any], **model_keys: Any) -> Path:
    base = write_model(folder / family, family)
    load(run_spec(str(base), method=method, **model_keys)).save(folder / "adapter")
    name_base(folder / "adapter", base)
    return folder / "adapter"


def result_of_run(spec: RunSpec, folder: Path) -> Result:
    place = new_run(folder / "runs", spec)
    assert train(place)[0] == 0
    return read_result(load_run_spec(place.run_toml, own=True), place.adapter)


def one_step_from(start: Path, folder: Path, method: dict[str, Any], **model_keys: Any) -> Result:
    spec = make_spec(
        write_samples(folder / "samples.jsonl", count=4),
        device="cpu",
        model={"id": str(start), "tokenizer": None, "init": "pretrained", **model_keys},
        method={"kind": "lora", "rank": 2, **method},
        train={"max_steps": 1, "batch_size": 2},
    )
    return result_of_run(spec, folder)


@pytest.mark.parametrize("case", REASONS)
def test_a_run_whose_adapter_servers_refuse_or_ignore_is_merged_and_says_why(tmp_path: Path, case: str) -> None:
    family, method, told = REASONS[case]
    result = one_step_from(write_model(tmp_path / family, family), tmp_path, method)
    assert len(result.merged_only) == 1 and told in result.merged_only[0]


def test_a_run_on_an_encoder_of_images_is_merged_and_says_why(tmp_path: Path) -> None:
    targets = ["model.visual.blocks.*.attn.qkv", "model.language_model.**.q_proj"]
    method = {"kind": "lora", "rank": 2, "targets": targets}
    result = result_of_run(image_spec(tmp_path, method=method, train={"max_steps": 1, "batch_size": 2}), tmp_path)
    (told,) = result.merged_only
    assert "outside the language model's layers" in told and "visual" in told


@pytest.mark.parametrize("family", ["qwen2", "llama", "mixtral"])
def test_adapters_on_linear_layers_are_served_as_they_are(tmp_path: Path, family: str) -> None:
    result = read_result(run_spec(), saved_adapter(tmp_path, family, {"rank": 3, "rslora": True}))
    assert result.merged_only == () and result.rank == 3
    assert result.base == str(tmp_path / family)


def test_the_plan_says_before_training_what_is_served_merged_only() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"dora": True, "rank": 600}, {}, "method.dora, method.rank = 600"),
        ({"also_train": ["model.norm.weight"]}, {}, "method.also_train"),
        ({"targets": EXPERTS}, {}, "experts"),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "model.rope_scaling"),
    ]
    for method, model, told in cases:
        (note,) = notes_on_serving(run_spec(method=method, **model).recipe)
        assert told in note
    assert not notes_on_serving(run_spec().recipe) and not notes_on_serving(run_spec(method={"kind": "full"}).recipe)


def test_scaled_positions_are_served_merged(tmp_path: Path) -> None:
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (told,) = one_step_from(write_model(tmp_path / "llama", "llama"), tmp_path, {}, **scaled).merged_only
    assert "RoPE scaling" in told


def test_layers_with_ranks_of_their_own_and_large_ranks_are_served_merged(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "base", "qwen2"))
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "lm_head"], rank_pattern={"v_proj": 8}, bias="lora_only"
    )
    get_peft_model(model, config).save_pretrained(str(tmp_path / "adapter"))
    written = read_table(tmp_path / "adapter" / "adapter_config.json")
    names = tensor_names(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    told = reasons_to_merge(written, names)
    assert any("rank_pattern" in each for each in told) and any("biases" in each for each in told)
    assert any("outside the language model's layers: lm_head" in each for each in told)
    assert "on a router" in " ".join(reasons_to_merge(written, ["base_model.model.layers.0.mlp.gate.lora_A.weight"]))
    assert "at most 512" in " ".join(reasons_to_merge({**written, "r": 600}, names))


def test_an_adapter_of_the_text_class_is_not_taken_for_one_of_the_nested_class(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_5", **NESTED["qwen3_5"])
    with torch.device("meta"):
        nested = auto_class(config).from_config(config)
        text = AutoModelForCausalLM.from_config(config.get_text_config())
    for model, lacking in ((nested, False), (text, True)):
        module = next(name for name, _ in model.named_modules() if name.endswith("layers.1.self_attn.q_proj"))
        told = unknown_modules(config, [f"base_model.model.{module}.lora_{part}.weight" for part in "AB"])
        assert bool(told) is lacking
    assert "Qwen3_5ForConditionalGeneration" in told[0]


def test_a_base_that_is_not_here_is_named_and_not_needed(tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path, "qwen2", {})
    (tmp_path / "qwen2").rename(tmp_path / "elsewhere")
    result = read_result(run_spec(), adapter)
    assert result.base == str(tmp_path / "qwen2") and result.merged_only == () and result.ends == (257, 262)
    assert "--lora-modules" in server_words("vllm", result, None)
    assert "may not list" in reasons_of_server("sglang", result)[0]


def test_a_damaged_adapter_is_told(tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path, "qwen2", {})
    (adapter / ADAPTER_WEIGHTS).write_bytes(b"\0" * 40)
    with pytest.raises(UsageError, match="cannot be read"):
        read_result(run_spec(), adapter)
