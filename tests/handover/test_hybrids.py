"""Merged models of Qwen3.5 with multi-token prediction, Granite 4 H and LFM2 load in a real llama.cpp and answer as
here.

Each base has the config.json of its published models, which transformers 5 would write with other keys. Needs
$TUNEDECK_CONVERTER, node with node-llama-cpp in $NODE_PATH, and the vocabulary qwen3 of tests/vocabularies.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.config.load import load_run_spec
from engine.extras.handover.consumers import find_node_package
from engine.extras.handover.gguf import problems_of_gguf, read_gguf
from engine.extras.handover.prepare import Order, prepare
from engine.extras.handover.result import read_result
from engine.model.config import auto_class
from engine.model.named_templates import named_template
from tests.train.run_helpers import make_spec, new_run, train
from tests.vocabularies import missing, vocabulary

CONVERTER = Path(os.environ.get("TUNEDECK_CONVERTER", "no converter"))
REASON = missing("qwen3") or (
    "" if CONVERTER.exists() and find_node_package() is not None else "no converter or node-llama-cpp"
)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ROWS = '{"prompt": "What is the capital of %s?", "completion": "%s it is"}\n'
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "initializer_range": 0.05,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "head_dim": 64, "tie_word_embeddings": False, "rope_theta": 10_000_000,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 128, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16, "attention_multiplier": 0.2,
    "logits_scaling": 2.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "tie_word_embeddings": True,
}  # fmt: skip
LFM: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", QWEN, {"mtp_num_hidden_layers": 1}),
    "granite 4 h": ("granitemoehybrid", GRANITE, {"layer_types": ["mamba", "attention"]}),
    "lfm2": ("lfm2", LFM, {"block_ff_dim": 128, "block_dim": 64, "layer_types": ["conv", "full_attention"]}),
}  # fmt: skip
"""By name: model type, keys of its size, and keys of its published config.json."""


def prediction(folder: Path) -> dict[str, torch.Tensor]:
    """A complete block of multi-token prediction, as Qwen3.5 has it: a layer like the decoder's last, and its ends."""
    state = load_file(folder / "model.safetensors")
    last = "model.layers.3."
    width = SIZES["hidden_size"]
    copied = {name.removeprefix(last): tensor.clone() for name, tensor in state.items() if last in name}
    block = {f"mtp.layers.0.{name}": tensor for name, tensor in copied.items()}
    ends = {f"mtp.{name}.weight": torch.ones(width) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    return {**block, **ends, "mtp.fc.weight": 0.02 * torch.randn(width, 2 * width)}


def write_base(folder: Path, name: str) -> Path:
    tokenizer = vocabulary("qwen3")
    tokenizer.chat_template = named_template("chatml", tokenizer)
    kind, keys, published = PUBLISHED[name]
    config = AutoConfig.for_model(
        kind, **{**SIZES, **keys}, vocab_size=-(-len(tokenizer) // 16) * 16, bos_token_id=None, pad_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    own = json.loads(file.read_text())
    own["torch_dtype"] = own.pop("dtype", "float32")
    file.write_text(json.dumps({**own, **published}))
    if "mtp_num_hidden_layers" in published:
        weights = folder / "model.safetensors"
        save_file({**load_file(weights), **prediction(folder)}, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_merged_model_loads_and_answers_as_here(tmp_path: Path, name: str) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text(ROWS % ("France", "Paris") + ROWS % ("Peru", "Lima"))
    base = write_base(tmp_path / "base", name)
    model = {"id": str(base), "tokenizer": None, "init": "pretrained", "dtype": "float32"}
    spec = make_spec(
        samples, model=model, method={"kind": "lora", "rank": 4},
        train={"max_steps": 24, "batch_size": 2, "learning_rate": 0.02},
        data={"sources": [{"name": "main", "path": str(samples)}]},
    )  # fmt: skip
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    result = read_result(load_run_spec(place.run_toml, own=True), place.adapter)
    done = prepare(result, Order("gguf", tmp_path / "out", converter=CONVERTER), print, check=True)
    assert done.failure is None, done.failure and done.failure.render()
    assert done.judgement is not None and done.judgement.verdicts == ["same"] * 5, done.judgement
    assert problems_of_gguf(read_gguf(tmp_path / "out" / "small-f16.gguf"), tmp_path / "out" / "merged") == []
    merged = json.loads((tmp_path / "out" / "merged" / "config.json").read_text())
    assert merged == json.loads((base / "config.json").read_text())
