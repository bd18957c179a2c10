"""Counts the model FLOPs of a training step, against which MFU is measured: what the products need, however they are
computed. Recomputation does not count (PaLM, appendix B, on MFU).

A product with a weight costs 2 FLOPs per weight and token in forward, 2 for its input's gradient, and 2 for its own if
it learns; attention costs the same for each pair of tokens. Not counted: vision encoders, norms, convolutions over
tokens, and the recurrences of linear attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedConfig

from engine.architecture.families import EXPERT_COUNTS
from engine.architecture.parameters import in_vision_encoder
from engine.model.config import layer_config
from engine.model.loaded import LoadedModel, plain_name

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_PER_TOKEN_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k")


@dataclass(frozen=True)
class AttentionFlops:
    """Of one layer."""

    per_pair: float
    """FLOPs per pair of query and key token."""
    window: int | None
    """Tokens that a query looks back; None: all. A mask that hides half of the pairs does not make them fewer."""


@dataclass(frozen=True)
class StepFlops:
    per_token: float
    per_target: float
    """Of the head, which is computed for tokens that count in the loss."""
    attention: tuple[AttentionFlops, ...]

    def of(self, lengths_D: NDArray[np.int64], targets: int) -> float:
        """FLOPs of a step over documents of these lengths, `targets` of whose tokens count in the loss."""
        lengths_D = lengths_D.astype(np.float64)
        pairs = [
            layer.per_pair * (lengths_D * np.minimum(lengths_D, layer.window or np.inf)).sum()
            for layer in self.attention
        ]
        return float(self.per_token * lengths_D.sum() + self.per_target * targets + sum(pairs))


def step_flops(loaded: LoadedModel) -> StepFlops | None:
    """None for a mixture that does not tell how many experts a token uses."""
    share = _active_share(loaded)
    if share is None:
        return None
    head = loaded.base.get_output_embeddings()
    per_token = per_target = 0.0
    attention = []
    reached = False  # whether anything learns before this module, so that its input needs a gradient
    wrapped: tuple[str, ...] = ()
    for name, module in loaded.base.named_modules():
        if in_vision_encoder(plain_name(name)):
            continue
        if isinstance(module, ParamWrapper) and module.num_experts > 1:
            wrapped += (f"{name}.lora_A.", f"{name}.lora_B.")
        if getattr(module, "is_causal", False) and hasattr(module, "config"):
            learns = reached or any(parameter.requires_grad for parameter in module.parameters())
            attention.append(_attention_flops(module, learns))
        part = share if name.startswith(wrapped) or _ONE_EXPERT.search(f"{name}.") else 1.0
        for size, learns in _products(module, share):
            flops = 2 * part * size * (1 + reached + learns)
            if head is not None and name.startswith(_name_of(loaded, head)):
                per_target += flops
            else:
                per_token += flops
        reached |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return StepFlops(per_token, per_target, tuple(attention))


def _name_of(loaded: LoadedModel, module: nn.Module) -> str:
    return next(str(name) for name, each in loaded.base.named_modules() if each is module)


def _products(module: nn.Module, share: float) -> Iterator[tuple[float, bool]]:
    """(weights used per token, whether they learn) of the products with this module's own weights. Fused experts are
    one tensor [E, ., .]; 4-bit weights lie packed, so that a layer's widths tell their number."""
    if isinstance(module, (nn.Embedding, *_CONVOLUTIONS)):
        return
    if isinstance(module, nn.Linear):
        yield float(module.in_features * module.out_features), module.weight.requires_grad
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            yield share * parameter.numel(), parameter.requires_grad
        elif parameter.dim() == 2 and not name.endswith("bias"):
            yield float(parameter.numel()), parameter.requires_grad


def _attention_flops(module: nn.Module, learns: bool) -> AttentionFlops:
    """Scores and weighted values of one attention layer; in backward each product has two."""
    config: Any = layer_config(cast(PreTrainedConfig, module.config), module)
    heads = _first(module, "num_heads", "num_attention_heads") or _first(config, "num_attention_heads")
    width = _first(module, "qk_head_dim", "head_dim", "head_size") or config.hidden_size // heads
    value_width = _first(module, "v_head_dim") or width
    window: int | None = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return AttentionFlops(2.0 * heads * (width + value_width) * (3 if learns else 1), window)


def _active_share(loaded: LoadedModel) -> float | None:
    """The part of the experts that a token uses; 1 in a model without experts, None if the config does not tell."""
    text = loaded.base.config.get_text_config()
    experts = _first(text, *EXPERT_COUNTS)
    if not experts:
        return 1.0
    used = _first(text, *_PER_TOKEN_KEYS)
    return used / experts if used else None


def _first(owner: object, *names: str) -> int:
    """The first of these attributes that is a positive whole number; 0 if none is."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
