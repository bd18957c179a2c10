"""Proof: the attention kernel computes softmax(QKᵀ·scale)V, causal, for this model's heads, and its gradients.

Shapes: B rows, H query heads, K key heads, S tokens, D features of a head.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.model.loss import autocast, decoder_of
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

LENGTHS = (61, 131)
"""Primes, so that no tile of a kernel is full and no length was seen when a kernel was tuned."""
REFERENCES = ("sdpa", "eager")
"""What a run falls back to, the faster first."""


class Heads(NamedTuple):
    """The shape of a model's attention."""

    query: int
    key: int
    features: int
    scale: float
    softcap: float | None


def applies(setup: TrainingSetup) -> bool:
    """Whether attention goes through transformers' table of kernels. "eager" is the model's own code, in torch's
    operations."""
    loaded = setup.context.loaded
    return loaded.attention != "eager" and _heads(setup) is not None and loaded.base._can_set_attn_implementation()


def facts(setup: TrainingSetup) -> list[str]:
    """Kernel, dtype and shape of the heads."""
    loaded = setup.context.loaded
    return [loaded.attention, str(loaded.precision.compute), str(_heads(setup))]


def prove(setup: TrainingSetup) -> str:
    """Compare output and gradients with fp32 arithmetic at two lengths."""
    kernel = setup.context.loaded.attention
    worst = max(_error(setup, kernel, length) for length in LENGTHS)
    return f"{kernel} is within {worst:.1e} of fp32 at {LENGTHS[0]} and {LENGTHS[1]} tokens, gradients too"


def fall_back(setup: TrainingSetup) -> str:
    """Use the first reference that passes where the kernel failed; the last one is the model's own code."""
    for reference in REFERENCES:
        if reference == "eager" or _passes(setup, reference):
            setup.context.loaded.use_attention(reference)
            break
    return f"attention = {setup.context.loaded.attention}"


def repeats(setup: TrainingSetup) -> None:
    """Run the kernel twice. Raises DisprovedError if output or gradients differ in a bit."""
    first, second = (_results(setup, _kernel(setup, setup.context.loaded.attention), LENGTHS[1]) for _ in range(2))
    for name, one in first.items():
        if not torch.equal(one, second[name]):
            raise DisprovedError(f"attention's {name} differs between two runs on the same input")


def _passes(setup: TrainingSetup, kernel: str) -> bool:
    if kernel == setup.context.loaded.attention:
        return False
    try:
        return all(_error(setup, kernel, length) < 1 for length in LENGTHS)
    except (DisprovedError, RuntimeError, ValueError, ImportError):
        return False


def _error(setup: TrainingSetup, kernel: str, length: int) -> float:
    found = _results(setup, _kernel(setup, kernel), length)
    expected = _results(setup, lambda *heads: _reference(setup, *heads), length, torch.float32)
    limit = tolerance(setup.context.loaded.precision.compute)
    return max(require_close(f"{name} at {length} tokens", found[name], expected[name], limit) for name in expected)


def _results(
    setup: TrainingSetup, attend: Callable[..., Tensor], length: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output of `attend` [B, S, H, D] for inputs rounded to the run's dtype, and the gradients of the inputs. With
    `dtype`, the rounded inputs are converted to it."""
    heads, compute = _heads(setup), setup.context.loaded.precision.compute
    assert heads is not None
    shapes = [(1, count, length, heads.features) for count in (heads.query, heads.key, heads.key)]
    given = [drawn(shape, compute, setup, seed).to(dtype or compute) for seed, shape in enumerate(shapes)]
    query, key, value = (tensor.requires_grad_() for tensor in given)
    with torch.enable_grad():
        output = attend(query, key, value)
        upstream = drawn(tuple(output.shape), compute, setup, 3).to(output.dtype)
        gradients = torch.autograd.grad(output, (query, key, value), upstream)
    names = ("the gradient of queries", "the gradient of keys", "the gradient of values")
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def _kernel(setup: TrainingSetup, name: str) -> Callable[..., Tensor]:
    """The kernel as the model's layers call it: with their module, causal and without a mask."""
    loaded, heads = setup.context.loaded, _heads(setup)
    module, extra = _module(setup), {}
    assert heads is not None
    if heads.softcap is not None:
        extra["softcap"] = heads.softcap

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        function: Any = ALL_ATTENTION_FUNCTIONS[name]
        before = module.config._attn_implementation
        module.config._attn_implementation = name
        try:
            with autocast(loaded):
                output, _ = function(
                    module, query, key, value, None, dropout=0.0, scaling=heads.scale, is_causal=True, **extra
                )
        finally:
            module.config._attn_implementation = before
        result: Tensor = output
        return result

    return attend


def _reference(setup: TrainingSetup, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> Tensor:
    """Attention by its formula (Vaswani et al. 2017, section 3.2.1), with as many key heads as query heads."""
    heads = _heads(setup)
    assert heads is not None
    repeats = heads.query // heads.key
    key_BHSD, value_BHSD = (each.repeat_interleave(repeats, 1) for each in (key_BKSD, value_BKSD))
    scores_BHSS = query_BHSD @ key_BHSD.transpose(2, 3) * heads.scale
    if heads.softcap is not None:
        scores_BHSS = (scores_BHSS / heads.softcap).tanh() * heads.softcap
    length = query_BHSD.shape[2]
    later_SS = torch.ones(length, length, dtype=torch.bool, device=query_BHSD.device).triu(1)
    weights_BHSS = scores_BHSS.masked_fill(later_SS, float("-inf")).softmax(-1)
    return (weights_BHSS @ value_BHSD).transpose(1, 2)


def _heads(setup: TrainingSetup) -> Heads | None:
    """The shape of the model's attention; None for a model whose layers say nothing of it, or whose queries and values
    have different widths."""
    config: Any = setup.context.loaded.config.get_text_config()
    query, module = getattr(config, "num_attention_heads", None), _module(setup)
    if not isinstance(query, int) or module is None or getattr(config, "kv_lora_rank", None):
        return None
    features = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // query
    groups = int(getattr(module, "num_key_value_groups", 1))
    scale = getattr(module, "scaling", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    return Heads(query, query // groups, int(features), float(scale or features**-0.5), softcap)


def _module(setup: TrainingSetup) -> Any:
    """The attention module of the decoder's first layer that has one; None if no module says that it is causal."""
    modules = decoder_of(setup.context.loaded.base).modules()
    return next((module for module in modules if getattr(module, "is_causal", False)), None)
