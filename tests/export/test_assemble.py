"""Assembling dense models into a mixture: every weight is a copy, and a mixture of equal experts is the dense model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.architecture.assembled import MIXTURES, MixtureFamily, assembled_config, problems_of_experts
from engine.errors import EnvironmentProblem, UsageError
from engine.extras.stages.assemble import Expert, Mixture, assemble_experts

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "rope_theta": 30000.0},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
TOKENS = torch.arange(40).remainder(64).view(2, 20)


def dense(folder: Path, family: str, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a small dense model with random weights to `folder`, as save_pretrained does; `changes` override keys of
    its config. Returns `folder`."""
    torch.manual_seed(seed)
    table = {**SIZES, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(table.pop("model_type"), **table)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def assembled(folder: Path, experts: list[Path], **options: Any) -> Path:
    named = [Expert(f"e{number}", place) for number, place in enumerate(experts)]
    mixture = Mixture(named, options.pop("per_token", 2), options.pop("shared", ()), seed=1, **options)
    assemble_experts(mixture, folder, lambda text: None)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits.float()
    return found


EQUAL = 1e-6
"""Largest difference of fp32 logits of size 1.7 that counts as equal: mixtures sum in another order. Measured over all
families: 0 to 2.5e-7 for one expert a token, 4.8e-7 for two, 0 for two with a router of zeros."""


def largest_difference(mixture: Path, one: Path) -> float:
    return float((logits(mixture) - logits(one)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_of_equal_experts_is_the_dense_model(tmp_path: Path, family: str) -> None:
    one = dense(tmp_path / "dense", family, 0)
    for per_token in (1, 2):
        mixture = assembled(tmp_path / f"mixture-{per_token}", [one] * 3, per_token=per_token)
        assert largest_difference(mixture, one) <= EQUAL
    even = assembled(tmp_path / "even", [one] * 3, router_rows=lambda layer: torch.zeros(3, 32))
    assert largest_difference(even, one) <= EQUAL
    loaded: Any = AutoModelForCausalLM.from_pretrained(mixture, output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.config.num_experts_per_tok == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_a_copy(tmp_path: Path, family: str) -> None:
    folders = [dense(tmp_path / "a", family, 0), dense(tmp_path / "b", family, 1)]
    mixture = assembled(tmp_path / "mixture", folders, shared=["**"])
    kind = FAMILIES[family]["model_type"]
    found = load_file(mixture / "model-00001-of-00001.safetensors")
    for number, folder in enumerate(folders):
        for name, weight in load_file(folder / "model.safetensors").items():
            target = expert_name(MIXTURES[kind], name, number)
            if target == name and number:
                continue  # shared: the first expert's
            assert torch.equal(found[target], weight), target


def expert_name(family: MixtureFamily, name: str, number: int) -> str:
    head, _, rest = name.partition(".mlp.")
    if not rest:
        return name
    projection = rest.removesuffix(".weight")
    return f"{head}.{family.experts.format(expert=number)}.{family.projections[projection]}.weight"


def test_what_differs_is_averaged_or_taken_from_the_first(tmp_path: Path) -> None:
    folders = [dense(tmp_path / "a", "llama", 0), dense(tmp_path / "b", "llama", 1)]
    weights = [load_file(folder / "model.safetensors")["model.norm.weight"] for folder in folders]
    named = [Expert("a", folders[0]), Expert("b", folders[1])]
    difference = assemble_experts(Mixture(named, 2, ["model.layers"], seed=1), tmp_path / "mixture", lambda text: None)
    found = load_file(tmp_path / "mixture" / "model-00001-of-00001.safetensors")
    assert torch.allclose(found["model.norm.weight"], (weights[0] + weights[1]) / 2)
    own = load_file(folders[0] / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], own)
    assert sorted(difference.averaged) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert difference.relative > 0 and difference.parameter in difference.averaged


TRAPS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], None]]] = {
    "Mixtral's own rope_theta": ("llama", {}, lambda config: config.update(rope_parameters=None, rope_theta=1e6)),
    "llama3's rope is dropped": (
        "llama with llama3 rope", {},
        lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 50000.0}),
    ),
    "the window is dropped": ("mistral", {}, lambda config: config.update(sliding_window=None)),
    "router weights are not normalised, qwen3": ("qwen3", {}, lambda config: config.update(norm_topk_prob=False)),
    "router weights are not normalised, qwen2": ("qwen2", {}, lambda config: config.update(norm_topk_prob=False)),
    "Mixtral's own epsilon": ("llama", {}, lambda config: config.update(rms_norm_eps=1e-2)),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_each_known_mistake_changes_the_model(tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixture equals the dense model; it no longer does if one key of its config has the default of the mixture's
    family."""
    family, changes, spoil = TRAPS[trap]
    one = dense(tmp_path / "dense", family, 0, **changes)
    assert largest_difference(assembled(tmp_path / "mixture", [one] * 3), one) <= EQUAL

    def spoiled(*arguments: Any) -> dict[str, Any]:
        config = assembled_config(*arguments)
        spoil(config)
        return config

    monkeypatch.setattr("engine.extras.stages.assemble.assembled_config", spoiled)
    assert largest_difference(assembled(tmp_path / "spoiled", [one] * 3), one) > 1e-3


def test_a_mixture_that_lacks_its_head_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config says that the embeddings are not tied, and no file has a head."""
    one = dense(tmp_path / "dense", "qwen2", 0, tie_word_embeddings=True)

    def spoiled(*arguments: Any) -> dict[str, Any]:
        return {**assembled_config(*arguments), "tie_word_embeddings": False}

    monkeypatch.setattr("engine.extras.stages.assemble.assembled_config", spoiled)
    with pytest.raises(EnvironmentProblem, match=r"1 weights are in no file, such as lm_head.weight"):
        assembled(tmp_path / "spoiled", [one] * 3)
    assert not (tmp_path / "spoiled").exists()


def test_a_shared_expert_that_is_not_zero_changes_the_model(tmp_path: Path) -> None:
    one = dense(tmp_path / "dense", "qwen2", 0)
    mixture = assembled(tmp_path / "mixture", [one] * 3)
    file = mixture / "model-00001-of-00001.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("shared_expert.down_proj.weight"):
            assert not weights[name].any()
            weights[name] = torch.full_like(weights[name], 0.3)
    save_file(weights, file, metadata={"format": "pt"})
    assert largest_difference(mixture, one) > 1e-3


def test_a_model_made_in_bfloat16_keeps_its_rotary_table_in_float32(tmp_path: Path) -> None:
    """Converting a loaded model to bfloat16 would also round the rotary table, which changes the output at every token.
    The engine therefore loads the model in its dtype."""
    one = dense(tmp_path / "dense", "llama", 0)
    mixture = assembled(tmp_path / "mixture", [one] * 3)
    exact = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).model.rotary_emb.inv_freq
    loaded: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, exact)
    assert not torch.equal(loaded.to(torch.bfloat16).model.rotary_emb.inv_freq.float(), exact)


def test_bfloat16_is_copied_bit_for_bit(tmp_path: Path) -> None:
    one = dense(tmp_path / "dense", "qwen2", 0, torch.bfloat16)
    mixture = assembled(tmp_path / "mixture", [one, one])
    assert largest_difference(mixture, one) <= 1.6e-2  # bf16's rounding of two weighted experts
    assert largest_difference(assembled(tmp_path / "single", [one, one], per_token=1), one) <= 1e-3
    found = load_file(mixture / "model-00001-of-00001.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_everything_that_cannot_be_assembled_is_named_at_once(tmp_path: Path) -> None:
    one = dense(tmp_path / "a", "llama", 0)
    wider = dense(tmp_path / "b", "llama", 1, intermediate_size=64, vocab_size=80)
    with pytest.raises(UsageError) as caught:
        assembled(tmp_path / "mixture", [one, wider])
    assert "intermediate_size = 64" in caught.value.found and "vocab_size = 80" in caught.value.found
    mixture = assembled(tmp_path / "mixture", [one, one])
    with pytest.raises(UsageError, match="already a mixture of experts"):
        assembled(tmp_path / "again", [mixture, mixture])
    biased = dense(tmp_path / "c", "llama", 1, attention_bias=True)
    with pytest.raises(UsageError, match="attention_bias"):
        assembled(tmp_path / "again", [biased, biased])
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen2", {"use_sliding_window": True}, "sliding-window layers are not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias = true"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised"),
    ],
)
def test_what_no_mixture_can_have_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    config = {**SIZES, **FAMILIES[family], **changes}
    assert any(reason in problem for problem in problems_of_experts(["a", "b"], [config, config]))


def test_other_dtypes_adapters_and_too_many_experts_a_token_are_refused(tmp_path: Path) -> None:
    one = dense(tmp_path / "a", "llama", 0)
    narrow = dense(tmp_path / "b", "llama", 0, torch.bfloat16)
    with pytest.raises(UsageError, match=r"e1: lm_head\.weight is BF16 .* in e0 F32"):
        assembled(tmp_path / "mixture", [one, narrow])
    with pytest.raises(UsageError, match="3 experts per token of 2"):
        assembled(tmp_path / "mixture", [one, one], per_token=3)
    (narrow / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot assemble adapters: e1"):
        assembled(tmp_path / "mixture", [one, narrow])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folders = [dense(tmp_path / name, "qwen2", 0) for name in ("a", "b")]
    for number, folder in enumerate(folders):
        (folder / "tokenizer.json").write_text(json.dumps({"version": str(number)}))
    with pytest.raises(UsageError, match=r"e1: tokenizer\.json differs"):
        assembled(tmp_path / "mixture", folders)


def test_a_router_depends_on_the_seed_and_the_layer_alone(tmp_path: Path) -> None:
    one = dense(tmp_path / "dense", "qwen3", 0)
    first, second = (load_file(assembled(tmp_path / name, [one, one]) / "model-00001-of-00001.safetensors")
                     for name in ("x", "y"))  # fmt: skip
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], first["model.layers.1.mlp.gate.weight"])


def test_keys_that_a_dense_config_leaves_out_keep_the_dense_familys_default() -> None:
    short = {"model_type": "mistral", "num_attention_heads": 32, "intermediate_size": 48}
    config = assembled_config(short, 4, 2)
    assert (config["sliding_window"], config["num_key_value_heads"], config["rope_theta"]) == (4096, 8, 10000.0)
    assert assembled_config({**short, "model_type": "llama"}, 4, 2)["num_key_value_heads"] == 32
