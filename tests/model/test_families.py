"""Families with special features: each is trained with adapters that learn, or is refused in one sentence before a run
exists."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import modeling_auto as auto
from typer.testing import CliRunner

from benchmarks.type_cell import opened, write_tiny
from benchmarks.type_configs import tiny_config
from engine.architecture.classes import MAPPINGS, _is_encoder_decoder, _table
from engine.architecture.families import (
    ENCODERS,
    PEFT_EXPERT_FAMILIES,
    PEFT_EXPERT_NAMES,
    experts_note,
    needs_own_code,
    refuse_family,
)
from engine.architecture.lookup import find_facts
from engine.budget.advise.preflight import notes_on_model
from engine.cli import app
from engine.config.schema.recipe import Method
from engine.config.schema.run import Limits, RunSpec
from engine.errors import UsageError
from engine.launch.create_run import create_run
from engine.model.loss import make_loss
from engine.model.tokenizer import byte_tokenizer
from tests.model.samples import batch_of, cpu, disturb, load, load_family, logits_of, run_spec, write_model

IDS = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
SIZES: dict[str, Any] = {**IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES["num_attention_heads"] = 4
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MAMBA = {**IDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
JAMBA = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}

ODD: dict[str, dict[str, Any]] = {
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "jamba": {**SIZES, **JAMBA, "num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    "deepseek_v2": {**SIZES, **MOE, **LATENT, **DEEPSEEK, "num_key_value_heads": 4},
    "phimoe": {**SIZES, **MOE, "num_key_value_heads": 2},
    "deepseek_v4": {
        **SIZES,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "index_topk": 16,
        "sliding_window": 16,
        "mlp_layer_types": ["moe", "moe"],
        "layer_types": ["sliding_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "llama4_text": {**SIZES, **MOE, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 48},
    "recurrent_gemma": {**SIZES, "num_key_value_heads": 2, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "xglm": {**IDS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "dropout": 0.0},
}

LEFT_OUT = {
    "mamba": {"mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"},
    "mamba2": {"mixer.out_proj"},
    "jamba": {"mamba.x_proj", "mamba.dt_proj", "mamba.out_proj"},
    "deepseek_v2": {
        f"{block}.{name}" for block in ("mlp", "shared_experts") for name in ("gate_proj", "up_proj", "down_proj")
    },
    "deepseek_v4": {"self_attn.o_a_proj"},
    "phimoe": {"mlp.router"},
    "llama4_text": {"feed_forward.router"},
}
"""Linear layers that "all-linear" leaves out, by family; none in the others."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ODD)
def test_every_adapter_of_all_linear_learns_and_opens_with_peft(tmp_path: Path, family: str) -> None:
    loaded = load(run_spec(str(write_model(tmp_path / family, family, **ODD[family]))))
    assert set(loaded.coverage.left_out) == LEFT_OUT.get(family, set())
    notices = "\n".join(loaded.notices)
    assert all(name in notices for name in LEFT_OUT.get(family, ()))
    assert ("puts no adapter on the experts" in notices) == bool(loaded.coverage.experts_left_out)
    disturb(loaded)
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=None, device=cpu())
    loss(batch_of()).backward()
    assert not [name for name, parameter in loaded.trainable() if parameter.grad is None or not parameter.grad.any()]
    loaded.save(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        reopened = PeftModel.from_pretrained(base, tmp_path / "result")
    batch = batch_of()
    torch.testing.assert_close(logits_of(reopened, batch), logits_of(loaded.model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [("mamba", ["in_proj", "out_proj"]), ("mamba2", "attention"), ("deepseek_v2", ["q_a_proj", "**.gate_proj"])],
)
def test_targets_without_room_for_an_adapter_are_refused_by_the_config_alone(
    model_type: str, targets: str | list[str]
) -> None:
    spec = run_spec("owner/name", method={"targets": targets})
    with pytest.raises(UsageError, match=r"method\.targets.*" + model_type) as refused:
        refuse_family({"model_type": model_type}, spec.recipe)
    assert "all-linear" in refused.value.fix


def test_a_target_that_only_the_model_shows_to_be_impossible_is_refused_at_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v2", **ODD["deepseek_v2"])
    with pytest.raises(UsageError, match=r"no adapter on 'model\.layers\.0\.mlp\.down_proj'"):
        load(run_spec(str(folder), method={"targets": ["down_proj"]}))


@pytest.mark.parametrize("setting", [{"dora": True}, {"dropout": 0.1}])
def test_what_peft_cannot_do_on_fused_experts_is_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be applied to fused experts") as refused:
        load_family(tmp_path, "mixtral", method={"targets": ["experts.down_proj"], **setting})
    assert f"set method.{next(iter(setting))} = " in refused.value.fix


CONFIGS = {
    "t5": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    "bart": ({"model_type": "bart"}, "encoder-decoder"),
    "bert": ({"model_type": "bert"}, "is an encoder"),
    "modernbert": ({"model_type": "modernbert"}, "is an encoder"),
    "xlnet": ({"model_type": "xlnet"}, "permuted order"),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_models_that_are_not_causal_are_refused_in_the_same_words_before_a_run_exists(
    tmp_path: Path, family: str
) -> None:
    config, words = CONFIGS[family]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    recipe = 'kind = "recipe"\nmodel.id = "./model"\ndata.sources = [{name = "d", path = "builtin:dates"}]\n'
    (tmp_path / "mine.toml").write_text(recipe)
    chosen = ["-p", "80gb", "-r", str(tmp_path / "mine.toml")]
    said = [
        str(CliRunner().invoke(app, command).exception)
        for command in (
            ["recipes", "check", str(tmp_path / "mine.toml")],
            ["plan", *chosen],
            ["train", *chosen, "--runs", str(tmp_path / "runs")],
        )
    ]
    first = said[1].splitlines()[0]
    assert words in first and said[2].startswith(said[1]) and first in said[0]  # train also lacks a GPU
    assert not (tmp_path / "runs").exists()


def test_the_tables_of_classes_are_those_of_the_installed_transformers() -> None:
    """Read from their source, without importing it."""
    assert _table("configuration_auto.py", "CONFIG_MAPPING_NAMES").keys() == set(CONFIG_MAPPING)
    for file, name in (("processing_auto", "PROCESSOR"), ("image_processing_auto", "IMAGE_PROCESSOR")):
        theirs = vars(import_module(f"transformers.models.auto.{file}"))[f"{name}_MAPPING_NAMES"]
        assert _table(f"{file}.py", f"{name}_MAPPING_NAMES") == dict(theirs)
    for name in MAPPINGS:
        assert _table("modeling_auto.py", name) == dict(vars(auto)[name])


def test_encoder_decoders_are_those_whose_config_says_so() -> None:
    theirs = {kind: CONFIG_MAPPING[kind]().is_encoder_decoder is True for kind in ("bart", "whisper", "llama", "led")}
    assert {kind: _is_encoder_decoder(kind) for kind in theirs} == theirs


def test_a_decoder_of_an_encoders_family_is_not_refused() -> None:
    refuse_family({"model_type": "bert", "is_decoder": True}, run_spec("owner/name").recipe)


def test_the_tables_of_families_are_those_of_the_installed_packages() -> None:
    masked, causal = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES), set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {each for each in masked if CONFIG_MAPPING[each]().is_encoder_decoder is not True} <= ENCODERS
    assert causal & (ENCODERS - masked) == {"bert-generation"}  # an encoder unless its config says is_decoder
    ways = vars(conversion)["_MODEL_TO_CONVERSION_PATTERN"]
    for way, names in PEFT_EXPERT_NAMES.items():
        assert set(conversion._MOE_TARGET_MODULE_MAPPING[way]) == set(names)
        assert {type for type, each in ways.items() if each == way and type.islower()} == PEFT_EXPERT_FAMILIES[way]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "phimoe", "llama4_text", "jamba"])
def test_a_plan_says_of_every_mixture_that_its_experts_get_no_adapters(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    write_model(folder, family, **ODD.get(family, {}))
    recipe = run_spec(str(folder)).recipe
    (note,) = notes_on_model(recipe, find_facts(recipe.model))
    assert family in note and "experts.down_proj" in note
    facts = json.loads((folder / "config.json").read_text())
    assert experts_note(facts, run_spec(str(folder), method={"kind": "full"}).recipe) is None
    named = run_spec(str(folder), method={"targets": ["q_proj", "experts.down_proj"]})
    assert experts_note(facts, named.recipe) is None
    assert experts_note({"model_type": "qwen2"}, named.recipe.model_copy(update={"method": Method()})) is None


WORKS = "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
FAILS = WORKS + "    def __init__(self, config):\n        super().__init__(config)\n        config.gone\n"


def own_code(folder: Path, modeling: str) -> RunSpec:
    """A run spec around a model of an unknown type, which comes with a configuration and a modelling file."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    head = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    (folder / "configuration_own.py").write_text(f"{head}class OwnConfig(LlamaConfig):\n    model_type = 'own'\n")
    (folder / "modeling_own.py").write_text(f"{head}from .configuration_own import OwnConfig\n{modeling}")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto_map}))
    return run_spec(str(folder))


def trusting(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"limits": Limits(trust_remote_code=True)})


def test_code_that_comes_with_a_model_runs_when_the_command_allows_it(tmp_path: Path) -> None:
    spec = own_code(tmp_path / "works", WORKS)
    with pytest.raises(UsageError, match="does not run by default") as refused:
        create_run(spec, tmp_path / "runs")
    assert "--trust-remote-code" in refused.value.fix and not (tmp_path / "runs").exists()
    assert load(trusting(spec)).coverage.adapted


def test_code_that_comes_with_a_model_and_fails_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"code of .* fails with transformers .* AttributeError"):
        load(trusting(own_code(tmp_path / "fails", FAILS)))


def test_a_family_of_transformers_needs_no_code_of_its_own() -> None:
    published = {"model_type": "phi3", "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}
    assert not needs_own_code(published)
    assert needs_own_code({**published, "model_type": "internlm2"})


def test_a_type_that_is_opened_with_zeros_for_its_padding_is_not_trained_in_full(tmp_path: Path) -> None:
    """transformers marks the row of another tensor as filled from the file, so it fills it with zeros again."""
    model = write_tiny(tiny_config("youtu"), tmp_path / "youtu")
    weights, name = load_file(model / "model.safetensors"), "model.embed_tokens.weight"
    weights[name] = torch.ones_like(weights[name])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    found = opened(model).state_dict()[name]
    assert not found[IDS["pad_token_id"]].any() and found[0].all()
    facts = {"model_type": "youtu", "pad_token_id": 258}
    with pytest.raises(UsageError, match="always loads zeros for the padding token"):
        refuse_family(facts, run_spec("owner/name", method={"kind": "full"}).recipe)
    refuse_family(facts, run_spec("owner/name").recipe)
    refuse_family({"model_type": "youtu"}, run_spec("owner/name", method={"kind": "full"}).recipe)
