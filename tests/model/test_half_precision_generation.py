"""fp32 weights that are trained under fp16 autocast also generate text with attention kernels that take half precision
only.

The kernel is a stand-in: it casts as transformers' wrapper of flash attention does (rotary embeddings return fp32),
refuses fp32 as the kernel does, and computes with sdpa.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_flash_attention_utils import fa_peft_integration_check

from engine.config.schema.recipe import Generate
from engine.evaluate.generation import generate_tokens, generation_config
from engine.model.decoder import eval_mode
from tests.model.samples import load, run_spec


def half_precision_alone(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = fa_peft_integration_check(query, key, value, get_target_dtype(query, module))
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register("half_precision_alone", half_precision_alone)
AttentionMaskInterface.register("half_precision_alone", sdpa_mask)


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_full_fine_tuning_in_fp16_generates_with_any_attention(attention: str) -> None:
    loaded = load(run_spec(dtype="float16", method={"kind": "full"}))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    loaded.attention = attention
    if attention.startswith("flash"):
        loaded.base.set_attn_implementation("half_precision_alone")
    ids_BS = torch.tensor([[5, 6, 7], [258, 8, 9]])
    with eval_mode(loaded.model):
        settings = generation_config(Generate(max_new_tokens=2), None, 258)
        made_BS = generate_tokens(loaded, ids_BS, (ids_BS != 258).long(), settings)
    assert made_BS.shape == (2, 5)
