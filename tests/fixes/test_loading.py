"""Fixes of models: one is refused as it is loaded, the recipe is changed as the fix says, and it loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from engine.budget.advise.plan import make_plan
from engine.config.schema.run import RunSpec
from engine.errors import TunedeckError
from engine.extras.simulate.batch import images_of_rows
from engine.extras.simulate.step import simulate_step
from engine.model.expert_balance import expert_balance
from engine.model.head import find_head
from engine.model.verify import verify_logits
from tests.budget.metered_step import QWEN2, folder_of
from tests.budget.metered_step import run_spec as budget_spec
from tests.data.test_own_processor import own, spec_for
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.model.samples import load, run_spec, write_model
from tests.own_processors import write_own
from tests.train.run_helpers import make_spec, new_run, train, write_samples
from tests.train.test_own_processor_runs import spec_of

Keys = dict[str, Any]
SIZES: Keys = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
DEEPSEEK: Keys = {
    **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
LORA: Keys = {"kind": "lora", "rank": 4}
FULL: Keys = {"kind": "full"}


class Case(NamedTuple):
    family: str
    config: Keys
    wrong: Keys
    right: Keys


OWN_CODE = {"AutoModelForCausalLM": "modeling.Own"}
YARN = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
CASES = {
    "model/adapters:_refuse_on_experts": Case(
        "mixtral", {},
        {"method": {**LORA, "targets": ["experts.down_proj"], "dropout": 0.1}},
        {"method": {**LORA, "targets": ["experts.down_proj"], "dropout": 0.0}},
    ),
    "model/attention:choose_attention": Case(
        "gemma2", {}, {"attention": "sdpa"}, {"attention": "auto"},
    ),
    "model/positions:expect_scaled": Case("llama", {"auto_map": OWN_CODE}, YARN, {}),
    "model/token_rows:_cannot_grow": Case(
        "llama", {"auto_map": OWN_CODE}, {"add_tokens": ["<a>"], "method": FULL}, {"method": FULL}
    ),
    "model/token_rows:row_targets": Case(
        "llama", {"tie_word_embeddings": False},
        {"add_tokens": ["<a>"], "method": {**LORA, "also_train": ["lm_head"]}},
        {"add_tokens": ["<a>"], "method": {**LORA, "also_train": ["lm_head", "model.embed_tokens"]}},
    ),
}  # fmt: skip


MODELING = """\
from transformers import LlamaForCausalLM


class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb.rope_type = "default"

    def resize_token_embeddings(self, *arguments, **options):
        raise NotImplementedError("the table has a fixed size")
"""


def trusted(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"trust_remote_code": True})})


def refused_as(key: str, given: Given) -> None:
    assert was_given(text_of(key), given), given
    given.clear()


@pytest.mark.parametrize(("key", "case"), CASES.items(), ids=CASES)
def test_a_model_that_a_recipe_does_not_fit_is_loaded_as_the_fix_says(
    key: str, case: Case, tmp_path: Path, given: Given
) -> None:
    config = {name: value for name, value in case.config.items() if name != "auto_map"}
    folder = write_model(tmp_path / "model", case.family, **config)
    if "auto_map" in case.config:
        (folder / "modeling.py").write_text(MODELING)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "auto_map": OWN_CODE}))
    with pytest.raises(TunedeckError):
        load(trusted(run_spec(str(folder), **case.wrong)))
    refused_as(key, given)
    load(trusted(run_spec(str(folder), **case.right)))


def test_a_base_in_4_bits_is_none_where_bitsandbytes_does_not_compute(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "bitsandbytes.py").write_text('supported_torch_devices = {"cuda"}\n')
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = str(write_model(tmp_path / "model", "llama"))
    with pytest.raises(TunedeckError, match="does not support"):
        load(run_spec(folder, quantize="nf4"))
    refused_as("model/load:_nf4_config: set model.quantize", given)
    del sys.modules["bitsandbytes"]  # monkeypatch would put it back afterwards
    sys.path.remove(str(tmp_path / "site"))
    load(run_spec(folder, quantize="none"))


def test_an_adapter_is_gone_on_from_with_the_method_and_the_tokens_that_it_has(tmp_path: Path, given: Given) -> None:
    folder, adapter = str(write_model(tmp_path / "model", "llama")), tmp_path / "adapter"
    load(run_spec(folder, add_tokens=["<a>"], method=LORA)).save(adapter)
    continued: Keys = {"adapter": str(adapter), "init": "pretrained"}
    with pytest.raises(TunedeckError):
        load(run_spec(folder, **continued, add_tokens=["<a>"], method=FULL))
    refused_as("model/load:_apply_method", given)
    with pytest.raises(TunedeckError):
        load(run_spec(folder, **continued, add_tokens=["<b>", "<a>"], method=LORA))
    refused_as("model/token_rows:expect_rows_of", given)
    load(run_spec(folder, **continued, add_tokens=["<a>"], method=LORA))


def test_weights_are_read_into_the_model_and_method_that_wrote_them(tmp_path: Path, given: Given) -> None:
    folder, saved = str(write_model(tmp_path / "model", "llama")), tmp_path / "saved"
    method = {**LORA, "targets": ["q_proj"]}
    load(run_spec(folder, method=method)).save(saved)
    for key, change in (
        ("model/loaded:_other_parameters", {"targets": ["k_proj"]}),
        ("model/tensor_file:expect_shape", {"rank": 8}),
    ):
        with pytest.raises(TunedeckError):
            load(run_spec(folder, method={**method, **change})).load_weights(saved)
        refused_as(key, given)
    load(run_spec(folder, method=method)).load_weights(saved)


def test_a_tokenizer_that_cannot_be_used_is_replaced_by_another_one(tmp_path: Path, given: Given) -> None:
    folder = write_model(tmp_path / "model", "llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_text(json.dumps(tokenizer))
    (bare / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": settings["tokenizer_class"]}))
    with pytest.raises(TunedeckError):
        load(run_spec(str(folder), tokenizer=str(bare)))
    refused_as("model/tokenizer:give_pad_token", given)
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(TunedeckError):
        load(run_spec(str(folder), tokenizer=str(bare)))
    refused_as("model/config:_about_folder: set model.tokenizer", given)
    load(run_spec(str(folder), tokenizer=str(folder)))


def test_logits_that_overflow_in_fp16_are_finite_in_fp32(tmp_path: Path, given: Given) -> None:
    folder = write_model(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for dtype in ("float16", "float32"):
        loaded = load(run_spec(str(folder), dtype=dtype, method=FULL))
        if dtype == "float16":
            with pytest.raises(TunedeckError):
                verify_logits(loaded, find_head(loaded.base), loaded.device)
            refused_as("model/verify:verify_logits: set model.dtype", given)
        else:
            verify_logits(loaded, find_head(loaded.base), loaded.device)


def test_routers_with_a_rule_of_their_own_have_no_auxiliary_loss(tmp_path: Path, given: Given) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3", **DEEPSEEK)
    wrong, right = (run_spec(str(folder), moe={"aux_loss_weight": weight}) for weight in (0.01, 0.0))
    loaded = load(wrong)
    with pytest.raises(TunedeckError):
        expert_balance(wrong.recipe, loaded)
    refused_as("model/expert_balance:_refuse", given)
    assert expert_balance(right.recipe, loaded) is None


def test_images_that_are_resized_to_sides_are_taken_without_bounds(tmp_path: Path, given: Given) -> None:
    model = write_own(tmp_path / "model", "llava")
    with pytest.raises(TunedeckError):
        own(spec_for(model, tmp_path, image_max_pixels=56**2))
    refused_as("model/tokenizer:_bound_pixels", given)
    own(spec_for(model, tmp_path))


def test_a_plan_of_images_has_room_for_one(tmp_path: Path, given: Given) -> None:
    with pytest.raises(TunedeckError):
        images_of_rows(spec_of(tmp_path, "idefics3", data={"max_length": 3}))
    refused_as("extras/simulate/batch:_largest", given)
    assert images_of_rows(spec_of(tmp_path, "idefics3", data={"max_length": 300})) is not None


def test_images_that_are_filled_up_are_trained_from_a_small_micro_batch(tmp_path: Path, given: Given) -> None:
    with pytest.raises(TunedeckError):
        images_of_rows(spec_of(tmp_path, "gemma4"))
    refused_as("extras/simulate/batch:_refuse_empty_patches", given)
    spec = spec_of(tmp_path, "gemma4", steps=1, train={"micro_batch": 1, "batch_size": 2})
    assert train(new_run(tmp_path / "runs", spec))[0] == 0


def test_what_cannot_be_simulated_has_a_closed_form(tmp_path: Path, given: Given) -> None:
    spec = budget_spec(folder_of(QWEN2, tmp_path), model={"quantize": "nf4"}, method={"kind": "lora"})
    with pytest.raises(TunedeckError):
        simulate_step(spec, rows=1, length=16)
    refused_as("extras/simulate/step:simulate_step: leave out --exact: the memory formula covers it", given)
    assert make_plan(spec).margin_bytes > 0
    spec = budget_spec(folder_of(QWEN2, tmp_path))
    parallel = spec.profile.parallel.model_copy(update={"sequence": 2})
    spec = spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})
    with pytest.raises(TunedeckError):
        simulate_step(spec, rows=1, length=16)
    refused_as("extras/simulate/step:simulate_step: leave out --exact: the memory formula covers each", given)
    assert make_plan(spec).margin_bytes > 0


def test_documents_that_a_model_mixes_are_trained_without_packing(tmp_path: Path, given: Given) -> None:
    sizes = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    folder = str(write_model(tmp_path / "model", "openai-gpt", **sizes))
    samples = write_samples(tmp_path / "rows.jsonl", count=8)
    tables: Keys = {"model": {"id": folder}, "train": {"max_steps": 1, "batch_size": 2, "micro_batch": 2}}
    packed, apart = (make_spec(samples, data={"packing": packing}, **tables) for packing in (True, False))
    assert train(new_run(tmp_path / "runs", packed))[0] == 2
    refused_as("model/verify:_refusal", given)
    assert train(new_run(tmp_path / "runs", apart))[0] == 0


WALKED = (
    *CASES, "model/load:_nf4_config: set model.quantize", "model/load:_apply_method",
    "model/token_rows:expect_rows_of", "model/loaded:_other_parameters", "model/tensor_file:expect_shape",
    "model/tokenizer:give_pad_token", "model/config:_about_folder: set model.tokenizer",
    "model/verify:verify_logits: set model.dtype", "model/expert_balance:_refuse", "model/tokenizer:_bound_pixels",
    "extras/simulate/batch:_largest", "extras/simulate/batch:_refuse_empty_patches",
    "extras/simulate/step:simulate_step: leave out --exact: the memory formula covers it",
    "extras/simulate/step:simulate_step: leave out --exact: the memory formula covers each", "model/verify:_refusal",
)  # fmt: skip
"""The fix texts that the tests of this file execute."""
