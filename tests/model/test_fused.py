"""Fused kernels of norms, gated blocks and rotary embedding: found by asking the modules, equal to them under Triton's
interpreter, planned as they hold memory, given up where they are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from engine.architecture.facts import from_config
from engine.budget.trace.layer import fuses_gate, fuses_rotary
from engine.model.fused import FusedModules, gated_activation, norm_form, rotates_by_halves
from engine.model.liger import NormForm, using
from engine.model.trained import decoder_of
from tests.budget.budget_cases import FAMILIES
from tests.model.samples import MIXTURES, write_model
from tests.model.torch_kernels import TorchKernels, with_fused_modules
from tests.train.proofs.proved import proved, small_setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (LlamaRMSNorm, NormForm(0.0, "llama")),
        (GemmaRMSNorm, NormForm(1.0, "gemma")),
        (GptOssRMSNorm, NormForm(0.0, "gemma")),
        (Qwen3NextRMSNormGated, None),  # has a second input
        (nn.LayerNorm, None),
    ],
)
def test_a_norm_is_asked_what_it_computes(kind: type[nn.Module], form: NormForm | None) -> None:
    assert norm_form(kind) == form


def louder(block: Any, x: Tensor) -> Tensor:
    output: Tensor = 2.0 * LlamaMLP.forward(block, x)
    return output


LouderMLP: Any = type("LouderMLP", (LlamaMLP,), {"forward": louder})
"""Looks like Llama's, and computes something else."""


def test_modules_that_compute_something_else_keep_their_operations() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1
    )
    assert gated_activation(LlamaMLP(config)) == "silu"
    assert gated_activation(LouderMLP(config)) is None
    assert not rotates_by_halves(interleaved)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_plan_counts_as_fused_what_the_engine_fuses(config: dict[str, Any]) -> None:
    arch, given = from_config(config), {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **given))
    fused = FusedModules(decoder_of(model))
    try:
        dense = arch.experts is None
        assert bool(fused.norms) == (arch.layout != "gpt2")
        assert bool(fused.gates) == (fuses_gate(arch) and dense)
        assert fused.rotary == fuses_rotary(arch)
    finally:
        fused.remove()


INTERPRETED = """
import sys
import torch
import triton
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM
import liger_kernel.ops.geglu, liger_kernel.ops.rms_norm, liger_kernel.ops.swiglu
from engine.model.fused import FusedModules
from engine.model.liger import LigerKernels, using
from engine.model.trained import decoder_of
from tests.model.interpreted_liger import Interpreted, patch

patch()
for kind in sys.argv[1:]:
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(0, 300, (2, 21))

    def step():
        model.zero_grad()
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        return [output.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = step()
    fused = FusedModules(decoder_of(model))
    assert fused, kind
    with using(Interpreted()):
        worst = max(float((a - b).norm() / a.norm()) for a, b in zip(plain, step(), strict=True))
        with fused.off():
            assert torch.equal(step()[0], plain[0])
    fused.remove()
    assert torch.equal(step()[0], plain[0])
    assert worst < 1e-5, (kind, worst)
    print(kind, fused)
"""


def test_liger_s_kernels_give_the_results_of_the_modules_they_replace() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", INTERPRETED, "qwen3", "gemma3_text", "phi3"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4, "alpha": 12}, {"kind": "full"}], ids=str)
def test_right_kernels_are_proved_on_the_run_s_own_layers(method: dict[str, Any], tmp_path: Path) -> None:
    with small_setup(tmp_path, method=method) as setup, using(TorchKernels()):
        fused = with_fused_modules(setup)
        found = proved(setup, tmp_path)["fused"]
        assert found.passed and "RMS norms, feed-forward blocks, rotary embedding" in found.detail
        assert setup.context.loaded.fused is fused and fused.on
        fused.remove()


def test_wrong_kernels_are_given_up(tmp_path: Path) -> None:
    with small_setup(tmp_path) as setup, using(TorchKernels(wrong=1.01)):
        with_fused_modules(setup)
        found = proved(setup, tmp_path)["fused"]
        assert found.passed is False and "torch computes these modules" in found.fallback
        assert setup.context.loaded.fused is None
        layer, x = setup.context.loaded.base.model.layers[0], torch.ones(1, 3, 128)
        assert "forward" not in layer.input_layernorm.__dict__
        assert torch.equal(layer.mlp(x), type(layer.mlp).forward(layer.mlp, x))


@pytest.mark.parametrize(("wrong", "passes"), [(1.00001, True), (1.01, False)])
def test_a_router_s_near_ties_are_no_error_of_a_kernel(wrong: float, passes: bool, tmp_path: Path) -> None:
    """Regression: rounding gave a few tokens to other experts, and fused kernels were given up on a mixture."""
    folder = write_model(tmp_path / "model", "qwen3_moe", **MIXTURES["qwen3_moe"])
    model = {"id": str(folder), "tokenizer": str(folder), "init": "pretrained"}
    with small_setup(tmp_path, model=model) as setup, using(TorchKernels(wrong=wrong)), torch.no_grad():
        for layer in setup.context.loaded.base.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] + 1e-7 * torch.randn_like(gate))
        setup.context.loaded.fused = fused = FusedModules(decoder_of(setup.context.loaded.base))
        found = proved(setup, tmp_path)["fused"]
        fused.remove()
    assert found.passed is passes, found.detail


def test_a_run_without_a_card_fuses_nothing(tmp_path: Path) -> None:
    with small_setup(tmp_path) as setup:
        assert setup.context.loaded.fused is None
