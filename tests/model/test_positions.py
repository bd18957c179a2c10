"""data.max_length beyond a model's positions is refused with its fix; rotary positions are scaled where asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from engine.architecture.lookup import find_config
from engine.architecture.positions import positions_of, refuse_long_sequences, scaled_config, table_of_positions
from engine.checks.run import problems_of_run
from engine.cli import app
from engine.config.schema.recipe import Model, RopeScaling
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.errors import UsageError
from engine.extras.handover.merge import merge
from engine.model.config import load_config
from engine.model.decoder import hidden_states
from engine.model.loss import make_loss
from engine.model.reference import find_starting_weights
from tests.model.samples import batch_of, cpu, disturb, load, logits_of, name_base, run_spec, write_model
from tests.train.run_helpers import losses, make_spec, new_run, train, write_samples

YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0}
OPT = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48}
OPT |= {"max_position_embeddings": 128, "word_embed_proj_dim": 32}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def long_run(model: str, max_length: int, **keys: Any) -> RunSpec:
    spec = run_spec(model, **keys)
    data = spec.recipe.data.model_copy(update={"max_length": max_length})
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"data": data})})


def long_spec(folder: Path, max_length: int, scaling: dict[str, Any] | None, method: str = "lora") -> RunSpec:
    return long_run(str(folder), max_length, method={"kind": method}, rope_scaling=scaling)


@pytest.mark.parametrize(("family", "config"), [("gpt2", {}), ("opt", OPT)])
def test_learned_positions_end_where_their_table_ends(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    folder = str(write_model(tmp_path / family, family, **config))
    assert problems_of_run(long_run(folder, 128)) == []
    (problem,) = problems_of_run(long_run(folder, 129))
    assert problem == f"data.max_length = 129 exceeds the 128 positions of {folder}; set data.max_length = 128"
    (problem,) = problems_of_run(long_run(folder, 129, rope_scaling=RopeScaling(**YARN)))
    assert f"model.rope_scaling is not supported for {family}; leave out model.rope_scaling" in problem


def test_rotary_positions_may_be_scaled_instead(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", "llama"))
    (problem,) = problems_of_run(long_run(folder, 400))
    assert 'model.rope_scaling = {type = "yarn", factor = 3.13}' in problem
    assert problems_of_run(long_run(folder, 400, rope_scaling=RopeScaling(type="yarn", factor=3.13))) == []
    (problem,) = problems_of_run(long_run(folder, 600, rope_scaling=RopeScaling(**YARN)))
    assert "exceeds the 512 positions of model.rope_scaling (128 x 4)" in problem
    assert "factor = 4.69" in problem


def test_check_plan_and_train_say_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "gpt2")
    recipe = 'kind = "recipe"\nmodel.id = "./model"\ndata.sources = [{name = "d", path = "builtin:dates"}]\n'
    (tmp_path / "mine.toml").write_text(recipe)  # data.max_length = 2048 by default
    chosen = ["-p", "demo", "-r", str(tmp_path / "mine.toml")]
    said = [
        str(CliRunner().invoke(app, command).exception)
        for command in (
            ["recipes", "check", str(tmp_path / "mine.toml")],
            ["plan", *chosen],
            ["advise", *chosen],
            ["train", *chosen, "--runs", str(tmp_path / "runs")],
        )
    ]
    assert said[1].startswith("data.max_length = 2048 exceeds the 128 positions of")
    assert said[1] == said[2] == said[3] and said[1] in said[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("facts", "positions"),
    [
        ({"model_type": "bloom", "seq_length": 2048}, None),
        ({"model_type": "falcon", "alibi": True, "max_position_embeddings": 2048}, None),
        ({"model_type": "mamba"}, None),
        ({"model_type": "mpt", "max_seq_len": 2048, "attn_config": {"alibi": True}}, 2048),
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 8}}, 8),
        (
            {
                "model_type": "qwen3",
                "max_position_embeddings": 40960,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_positions_are_read_from_configs_new_and_old(facts: dict[str, Any], positions: int | None) -> None:
    assert positions_of(facts) == positions


def test_layers_that_see_everything_may_have_no_positions() -> None:
    """Beam: only its layers with a window rotate. Such a config was a TypeError."""
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None}
    facts = {"model_type": "beam", "max_position_embeddings": 8, "rope_parameters": rope}
    assert positions_of(facts) == 8 and table_of_positions(facts) is None
    with pytest.raises(UsageError, match=r"model\.rope_scaling is not supported for beam"):
        scaled_config(facts, RopeScaling(**YARN))


def test_phi_3_scales_its_positions_in_its_own_way_alone() -> None:
    phi = {"model_type": "phi3", "max_position_embeddings": 4096, "rope_theta": 10000.0}
    with pytest.raises(UsageError, match=r"model\.rope_scaling is not supported for phi3"):
        scaled_config(phi, RopeScaling(**YARN))
    with pytest.raises(UsageError) as refused:
        refuse_long_sequences(phi, long_run("it", 8192).recipe)
    assert refused.value.fix == "set data.max_length = 4096"


def test_a_scaling_that_the_model_has_already_is_not_replaced() -> None:
    llama, scaling = find_config("meta-llama/Llama-3.1-8B"), RopeScaling(type="yarn", factor=2.0)
    with pytest.raises(UsageError, match=r"already scales its positions \(llama3, up to 131072"):
        scaled_config(llama, scaling)
    once = scaled_config(find_config("Qwen/Qwen3-4B"), scaling)
    assert (once["max_position_embeddings"], positions_of(once)) == (81920, 81920)
    assert scaled_config(once, scaling) == once


def test_the_model_for_long_context_needs_no_scaling_and_its_predecessor_does() -> None:
    refuse_long_sequences(find_config("Qwen/Qwen3-4B-Instruct-2507"), long_run("it", 262144).recipe)
    with pytest.raises(UsageError, match="262144 exceeds the 40960 positions"):
        refuse_long_sequences(find_config("Qwen/Qwen3-4B"), long_run("it", 262144).recipe)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_a_run_trains_beyond_the_positions_and_its_result_carries_the_scaling(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path / "model", "llama", max_position_embeddings=32)
    samples = write_samples(tmp_path / "samples.jsonl", longest=120)
    keys = {"id": str(model), "init": "pretrained", "rope_scaling": {"type": kind, "factor": 4.0}}
    spec = make_spec(samples, device="cpu", model=keys, data={"max_length": 128}, train={"max_steps": 2})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0 and len(losses(events)) == 2
    rope = AutoConfig.from_pretrained(place.model).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
    assert positions_of(json.loads((place.model / "config.json").read_text())) == 128


def test_an_adapter_lies_beside_the_config_that_its_base_needs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    loaded = load(long_spec(folder, 512, YARN))
    disturb(loaded)
    loaded.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", folder)
    batch = batch_of(length=200)
    mine = logits_of(loaded.model, batch)
    config = AutoConfig.from_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with_peft = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter"), batch)
    torch.testing.assert_close(with_peft, mine, rtol=1e-4, atol=1e-5)
    merge(tmp_path / "adapter", tmp_path / "merged", lambda text: None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged, batch), mine, rtol=1e-4, atol=1e-4)
    start = find_starting_weights(Model(id=str(tmp_path / "adapter")))
    assert load_config(start, trust_remote_code=False).rope_parameters["rope_type"] == "yarn"


def test_gemma_scales_only_the_layers_that_see_the_whole_sequence(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    folder = write_model(tmp_path / "model", "gemma3_text", layer_types=kinds)
    rope = load(long_spec(folder, 512, {"type": "linear", "factor": 4.0})).base.config.rope_parameters
    assert rope["full_attention"]["rope_type"] == "linear"
    assert rope["sliding_attention"]["rope_type"] == "default"


def test_dynamic_frequencies_do_not_follow_the_micro_batch(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    loaded = load(long_spec(folder, 512, {"type": "dynamic", "factor": 4.0}))
    (rotary,) = [module for module in loaded.base.modules() if hasattr(module, "inv_freq")]
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](loaded.base.config, seq_len=512)
    assert torch.equal(rotary.get_buffer("inv_freq"), wanted)
    assert any("data.max_length = 512" in notice for notice in loaded.notices)
    short, long = batch_of(1, 20, masked=0), batch_of(1, 300, masked=0)
    before = hidden_states(loaded, short)
    hidden_states(loaded, long)
    assert torch.equal(hidden_states(loaded, short), before)


def test_phi_3_takes_one_set_of_frequencies_for_a_whole_run(tmp_path: Path) -> None:
    original = {"original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **original}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    folder = write_model(tmp_path / "model", "phi3", max_position_embeddings=256, rope_parameters=rope, **original)
    loaded = load(long_spec(folder, 256, None))
    make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=None, device=cpu())
    assert any("longrope" in notice for notice in loaded.notices)
    row = batch_of(1, 40, masked=0)
    assert row.attention_mask_BS is not None
    padded = Batch(
        torch.nn.functional.pad(row.input_ids_BS, (0, 60), value=258),
        torch.nn.functional.pad(row.labels_BS, (0, 60), value=-100),
        torch.nn.functional.pad(row.attention_mask_BS, (0, 60)),
        None,
        row.sample_ids,
        row.target_tokens,
    )
    alone, beside_longer = hidden_states(loaded, row), hidden_states(loaded, padded)[:, :40]
    torch.testing.assert_close(alone, beside_longer, rtol=1e-4, atol=1e-5)
    assert not [notice for notice in load(long_spec(folder, 64, None)).notices if "longrope" in notice]
