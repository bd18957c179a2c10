"""Flash kernels learn from the host where documents begin; no layer reads it back from the device.

The kernels need a card. Stand-ins with their signature compute each document by torch's own attention on the CPU.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash_utils

from engine.data.batch import Batch, Documents
from engine.device.host_syncs import host_syncs
from engine.model.decoder import hidden_states
from engine.model.loaded import LoadedModel
from engine.model.trained import decoder_of
from tests.model.samples import load_family

FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "mixtral", "olmo2", "cohere")


def attend(
    query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Causal attention of one document, limited to `window[0]` tokens to the left (-1: all)."""
    query_HSD, key_KSD, value_KSD = (tensor.transpose(0, 1) for tensor in (query_SHD, key_SKD, value_SKD))
    length = query_HSD.shape[1]
    distance_SS = torch.arange(length)[:, None] - torch.arange(length)[None]
    mask_SS = (distance_SS >= 0) & (distance_SS <= (window[0] if window[0] >= 0 else length))
    output_HSD = scaled_dot_product_attention(
        query_HSD[None], key_KSD[None], value_KSD[None], mask_SS, scale=scale, enable_gqa=True
    )[0]
    return output_HSD.transpose(0, 1)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1)
) -> Tensor:
    assert causal
    return torch.stack([attend(*row, softmax_scale, window_size) for row in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
) -> Tensor:
    assert causal
    bounds = cu_seqlens_q.numpy().tolist()
    assert cu_seqlens_q.dtype == torch.int32
    assert int(max_seqlen_q) == max(end - start for start, end in itertools.pairwise(bounds))
    pieces = [
        attend(q[start:end], k[start:end], v[start:end], softmax_scale, window_size)
        for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(pieces)


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = flash_attn_func, flash_attn_varlen_func, None, None, None
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)


def use_flash(loaded: LoadedModel) -> None:
    loaded.attention = "flash_attention_2"
    for module in decoder_of(loaded.base).modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = loaded.attention


def batch(rows: list[list[int]], *, packed: bool) -> Batch:
    """Random rows of documents of these lengths."""
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    ids_BS = torch.randint(0, 256, positions_BS.shape, generator=torch.Generator().manual_seed(3))
    lengths = [length for row in rows for length in row]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    documents = Documents(starts, max(lengths), len(lengths) == len(rows))
    return Batch(ids_BS, ids_BS, None, positions_BS if packed else None, (0,), 1, documents=documents)


@pytest.mark.parametrize("rows", [[[9, 5, 4], [3, 15]], [[20]], [[12], [12]]])
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_computes_what_sdpa_does_without_waiting_for_the_device(
    tmp_path: Path, family: str, rows: list[list[int]]
) -> None:
    loaded = load_family(tmp_path, family)
    given = batch(rows, packed=len(rows[0]) > 1)
    with torch.no_grad():
        expected_BSH = hidden_states(loaded, given)
        use_flash(loaded)
        found: list[Tensor] = []
        assert host_syncs(lambda: found.append(hidden_states(loaded, given))) == []
    torch.testing.assert_close(found[0], expected_BSH, rtol=1e-4, atol=1e-5)


def test_a_decoder_that_finds_documents_itself_still_separates_them(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "llama")
    given = batch([[9, 5, 4], [3, 15]], packed=True)
    with torch.no_grad():
        expected_BSH = hidden_states(loaded, given)
        use_flash(loaded)
        decoder = decoder_of(loaded.base)
        own_forward = decoder.forward

        def strict(input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: Any) -> Any:
            return own_forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
            )

        decoder.forward = strict
        found_BSH = hidden_states(loaded, given)
    torch.testing.assert_close(found_BSH, expected_BSH, rtol=1e-4, atol=1e-5)
