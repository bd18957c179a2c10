"""The attention kernel "varlen": torch's own flash attention for documents of different lengths, without a mask.

torch has had the kernel since 2.10 (`torch.nn.attention.varlen`); transformers does not know it, so it is registered
here. A micro-batch whose documents are known (`engine.model.documents`) is computed as one long row. Everything else,
such as generation with a cache, is computed by sdpa, with sdpa's masks.

The kernel runs on CUDA alone, in half precision, and has neither dropout nor a soft-cap nor sinks.

Try: `python -m pytest tests/model/test_varlen.py`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.errors import UsageError
from engine.model.documents import starts_are_handed_over

NAME = "varlen"


def register_varlen() -> None:
    """Register the kernel and its mask with transformers under the name "varlen". Calling it again has no effect."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, varlen_mask)


def varlen_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Make the mask of a forward pass, as sdpa needs it; None where the kernel is told where documents begin."""
    if starts_are_handed_over():
        return None
    mask: Tensor | None = sdpa_mask(*arguments, **options)
    return mask


def varlen_attention(
    module: torch.nn.Module,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for one layer, as transformers calls it; returns outputs [B, S, H, D] and None.

    `cu_seq_lens_q` and `max_length_q` are `starts_D1` and `longest` of `engine.data.batch.Documents`. Without them sdpa
    computes the attention. Raises UsageError if they are missing in a forward pass whose masks do not separate packed
    documents.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        if starts_are_handed_over():
            raise UsageError(
                f'model.attention = "varlen": {type(module).__name__} is not told where packed documents begin',
                fix='set model.attention = "sdpa"',
            )
        return sdpa_attention_forward(
            module, query_BHSD, key_BKSD, value_BKSD, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout or options.get("softcap") is not None or options.get("s_aux") is not None:
        raise UsageError(
            f'model.attention = "varlen" has no dropout, soft-cap or sinks, which {type(module).__name__} needs',
            fix='set model.attention = "auto"',
        )
    query_THD, key_TKD, value_TKD = (_flat(tensor) for tensor in (query_BHSD, key_BKSD, value_BKSD))
    width = value_TKD.shape[-1]
    if width < query_THD.shape[-1]:  # the kernel has one width for queries, keys and values
        value_TKD = torch.nn.functional.pad(value_TKD, (0, query_THD.shape[-1] - width))
    output_THD = varlen.varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    assert isinstance(output_THD, Tensor)
    batch, heads, length, _ = query_BHSD.shape
    return output_THD.view(batch, length, heads, -1)[..., :width], None


def _flat(tensor_BHSD: Tensor) -> Tensor:
    """All rows, one after another: [T, H, D] with T = B·S, in autocast's dtype if autocast is enabled."""
    device = tensor_BHSD.device.type
    if torch.is_autocast_enabled(device):
        tensor_BHSD = tensor_BHSD.to(torch.get_autocast_dtype(device))
    return tensor_BHSD.transpose(1, 2).flatten(0, 1)
