"""Proof: the attention kernel computes softmax(QKᵀ·scale)V, causal, for this model's heads, and its gradients.

The proof includes what the run adds to causal attention: documents packed into one row, a sliding window, attention
sinks.

Shapes: B rows, H query heads, K key heads, S tokens, D features of a head.

Try: `pytest tests/train/proofs/test_kernels.py`
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.model.decoder import autocast, decoder_of
from engine.model.documents import takes_starts
from engine.train.proofs.record import DisprovedError, drawn, require_close, tolerance
from engine.train.setup import TrainingSetup

LENGTHS = (61, 131)
"""Lengths in tokens that are tried. They are primes, so that no tile of a kernel is full and no length was seen when a
kernel was tuned."""
REFERENCES = ("sdpa", "eager")
"""What a run falls back to, the faster first."""


DOCUMENTS = (59, 2, 70)
"""Lengths of packed documents, LENGTHS[1] tokens in all; their borders lie inside of tiles."""
WINDOW = 17
"""A window that is shorter than a tile and than the lengths, in place of the model's own."""


class Variant(NamedTuple):
    """What a layer adds to causal attention."""

    name: str = ""
    documents: tuple[int, ...] = ()
    """Lengths of the documents of a row; empty for one document."""
    window: int | None = None
    """How many positions a token attends to, its own included."""
    sinks: bool = False
    """Each head has a logit that takes part in the softmax and belongs to no value (gpt-oss)."""


class Heads(NamedTuple):
    """The shape of a model's attention: numbers of query heads and of key heads, features of a head, the scale of the
    logits, and their soft cap (None without one)."""

    query: int
    key: int
    features: int
    scale: float
    softcap: float | None


def applies(setup: TrainingSetup) -> bool:
    """Whether a kernel from transformers' table computes attention (any but "eager", which is the model's own code),
    and the shape of the heads is known."""
    loaded = setup.context.loaded
    return loaded.attention != "eager" and _heads(setup) is not None and loaded.base._can_set_attn_implementation()


def facts(setup: TrainingSetup) -> list[str]:
    """What the outcome depends on: kernel, dtype, shape of the heads, and what the run adds to causal attention."""
    loaded = setup.context.loaded
    return [loaded.attention, str(loaded.precision.compute), str(_heads(setup)), str(_variants(setup))]


def prove(setup: TrainingSetup) -> str:
    """Compare the kernel's output and gradients with attention computed in fp32: causal attention at two lengths, and
    every variant of the run. Returns what was shown, in a few words. Raises DisprovedError if they differ by more than
    rounding."""
    kernel, variants = setup.context.loaded.attention, _variants(setup)
    worst = _worst_error(setup, kernel)
    beside = "".join(f", {variant.name}" for variant in variants)
    return f"{kernel} is within {worst:.1e} of fp32 at {LENGTHS[0]} and {LENGTHS[1]} tokens{beside}, gradients too"


def _worst_error(setup: TrainingSetup, kernel: str) -> float:
    """The largest relative error of a kernel over causal attention and all variants of the run. Raises DisprovedError
    if one is above rounding."""
    plain = [_error(setup, kernel, length, Variant()) for length in LENGTHS]
    return max(plain + [_error(setup, kernel, LENGTHS[1], variant) for variant in _variants(setup)])


def _variants(setup: TrainingSetup) -> list[Variant]:
    """Each different combination of what the run's layers add to causal attention."""
    config: Any = setup.context.loaded.config.get_text_config()
    packed = ("packed rows", DOCUMENTS) if setup.spec.recipe.data.packing else None
    slides = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    found = []
    if packed:
        found.append(Variant(*packed))
    if slides:
        found.append(Variant("a sliding window", packed[1] if packed else (), WINDOW))
    if getattr(_module(setup), "sinks", None) is not None:
        found = [variant._replace(sinks=True) for variant in found] + [Variant("attention sinks", sinks=True)]
    return found


def fall_back(setup: TrainingSetup) -> str:
    """Use the first reference kernel that passes this proof, and if none does, the model's own code; returns what the
    run does instead, in a few words."""
    for reference in REFERENCES:
        if reference == "eager" or _passes(setup, reference):
            setup.context.loaded.use_attention(reference)
            break
    return f"attention = {setup.context.loaded.attention}"


def repeats(setup: TrainingSetup) -> None:
    """Run the kernel twice. Raises DisprovedError if output or gradients differ in a bit."""
    kernel = _kernel(setup, setup.context.loaded.attention, Variant())
    first, second = (_results(setup, kernel, LENGTHS[1]) for _ in range(2))
    for name, one in first.items():
        if not torch.equal(one, second[name]):
            raise DisprovedError(f"attention's {name} differs between two runs on the same input")


def _passes(setup: TrainingSetup, kernel: str) -> bool:
    if kernel == setup.context.loaded.attention:
        return False
    try:
        return _worst_error(setup, kernel) < 1
    except (DisprovedError, RuntimeError, ValueError, ImportError):
        return False


def _error(setup: TrainingSetup, kernel: str, length: int, variant: Variant) -> float:
    found = _results(setup, _kernel(setup, kernel, variant), length)
    expected = _results(setup, lambda *heads: _reference(setup, variant, *heads), length, torch.float32)
    limit, where = tolerance(setup.context.loaded.precision.compute), f" with {variant.name}" if variant.name else ""
    return max(
        require_close(f"{name} at {length} tokens{where}", found[name], expected[name], limit) for name in expected
    )


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


def _kernel(setup: TrainingSetup, name: str, variant: Variant) -> Callable[..., Tensor]:
    """Return a function from queries, keys and values to the output of kernel `name`, called as the model's layers call
    it. Flash kernels are given the borders of documents; other kernels are given a mask if there are documents or a
    window."""
    loaded, heads = setup.context.loaded, _heads(setup)
    module, flash = _module(setup), takes_starts(name)
    assert heads is not None
    extra: dict[str, Any] = {} if heads.softcap is None else {"softcap": heads.softcap}
    if variant.window is not None:
        extra["sliding_window"] = variant.window
    if variant.sinks:
        extra["s_aux"] = module.sinks.detach().to(loaded.precision.compute)
    if variant.documents and flash:
        extra |= _starts(setup, variant.documents)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        function: Any = ALL_ATTENTION_FUNCTIONS[name]
        before = module.config._attn_implementation
        masked = not flash and (variant.documents or variant.window is not None)
        mask = _allowed(variant, query.shape[2], query.device)[None, None] if masked else None
        module.config._attn_implementation = name
        try:
            with autocast(loaded):
                output, _ = function(
                    module, query, key, value, mask, dropout=0.0, scaling=heads.scale, is_causal=mask is None, **extra
                )
        finally:
            module.config._attn_implementation = before
        result: Tensor = output
        return result

    return attend


def _starts(setup: TrainingSetup, documents: tuple[int, ...]) -> dict[str, Any]:
    """The keyword arguments that tell flash kernels at which positions the documents of a row begin (transformers'
    `FlashAttentionKwargs`). `documents` are their lengths."""
    with setup.context.device.host_region():
        starts = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    starts_D1, longest = setup.context.device.upload(starts), max(documents)
    return {"cu_seq_lens_q": starts_D1, "cu_seq_lens_k": starts_D1, "max_length_q": longest, "max_length_k": longest}


def _allowed(variant: Variant, length: int, device: torch.device) -> Tensor:
    """Mask [S, S]: True where the token of the row attends to the position of the column."""
    place_S = torch.arange(length, device=device)
    distance_SS = place_S[:, None] - place_S[None, :]
    allowed_SS = distance_SS >= 0
    if variant.window is not None:
        allowed_SS = allowed_SS & (distance_SS < variant.window)
    for border in accumulate(variant.documents):
        after_S = place_S >= border
        allowed_SS = allowed_SS & (after_S[:, None] == after_S[None, :])
    return allowed_SS


def _reference(
    setup: TrainingSetup, variant: Variant, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor
) -> Tensor:
    """Attention's output [B, S, H, D] by its formula (Vaswani et al. 2017, section 3.2.1). Key heads are repeated until
    there are as many as query heads."""
    heads = _heads(setup)
    assert heads is not None
    repeats = heads.query // heads.key
    key_BHSD, value_BHSD = (each.repeat_interleave(repeats, 1) for each in (key_BKSD, value_BKSD))
    scores_BHSS = query_BHSD @ key_BHSD.transpose(2, 3) * heads.scale
    if heads.softcap is not None:
        scores_BHSS = (scores_BHSS / heads.softcap).tanh() * heads.softcap
    length = query_BHSD.shape[2]
    scores_BHSS = scores_BHSS.masked_fill(~_allowed(variant, length, query_BHSD.device), float("-inf"))
    if variant.sinks:
        sinks_H = _module(setup).sinks.detach().to(setup.context.loaded.precision.compute).to(scores_BHSS.dtype)
        sinks_BHS1 = sinks_H.view(1, -1, 1, 1).expand(*scores_BHSS.shape[:3], 1)
        weights_BHSS = torch.cat([scores_BHSS, sinks_BHS1], -1).softmax(-1)[..., :-1]
    else:
        weights_BHSS = scores_BHSS.softmax(-1)
    return (weights_BHSS @ value_BHSD).transpose(1, 2)


def _heads(setup: TrainingSetup) -> Heads | None:
    """The shape of the model's attention; None if neither config nor layers state it, or if queries and values have
    different widths."""
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
