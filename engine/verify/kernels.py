"""Proofs of kernels: attention computes softmax(QKᵀ·scale)V, causal, for this model's heads; the loss is the sum of
token losses; dropout's masks are the reference's; with `train.deterministic`, attention and loss repeat bit for bit.

Shapes: B rows, H query heads, K key heads, S tokens, D features of a head; N tokens with a target, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.model.chunked import token_losses
from engine.model.config import layer_config
from engine.model.decoder import autocast
from engine.model.dropout import keyed_dropouts
from engine.model.dropout_kernel import difference, kernel_in_use, reference_drop, stop_using
from engine.model.head import OutputHead
from engine.model.loss import LossFunction
from engine.model.positions import takes_starts
from engine.model.trained import decoder_of
from engine.verify.record import (
    DisprovedError,
    Proof,
    ProvedRun,
    drawn,
    require_repeats,
    tolerance,
    worst_error,
)

LENGTHS = (61, 131)
"""Lengths in tokens that are tried. They are primes, so that no tile of a kernel is full and no length was seen when a
kernel was tuned."""
REFERENCES = ("sdpa", "eager")
"""What attention falls back to, the faster first."""
DOCUMENTS = (59, 2, 70)
"""Lengths of packed documents, LENGTHS[1] tokens in all; their borders lie inside of tiles."""
WINDOW = 17
"""A window that is shorter than a tile and than the lengths, in place of the model's own."""
TARGETS, CHUNK_TOKENS, VOCABULARY = 13, 5, 263
"""The loss over two full chunks and a part of one; the vocabulary fills no tile of a kernel."""


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


def _attention_applies(run: ProvedRun) -> bool:
    """Whether a kernel from transformers' table computes attention (any but "eager", which is the model's own code),
    and the shape of the heads is known."""
    loaded = run.context.loaded
    return loaded.attention != "eager" and heads_of(run) is not None and loaded.base._can_set_attn_implementation()


def _attention_facts(run: ProvedRun) -> list[str]:
    loaded = run.context.loaded
    return [loaded.attention, str(loaded.precision.compute), str(heads_of(run)), str(_variants(run))]


def prove_attention(run: ProvedRun) -> str:
    """Compare output and gradients with attention in fp32: causal at two lengths, and every variant of the run."""
    kernel, variants = run.context.loaded.attention, _variants(run)
    worst = _attention_error(run, kernel)
    beside = "".join(f", {variant.name}" for variant in variants)
    return f"{kernel} is within {worst:.1e} of fp32 at {LENGTHS[0]} and {LENGTHS[1]} tokens{beside}, also in gradients"


def _use_reference_attention(run: ProvedRun) -> str:
    for reference in REFERENCES:
        if reference == "eager" or _attends(run, reference):
            run.context.loaded.use_attention(reference)
            break
    return f"attention = {run.context.loaded.attention}"


def _attends(run: ProvedRun, kernel: str) -> bool:
    if kernel == run.context.loaded.attention:
        return False
    try:
        return _attention_error(run, kernel) < 1
    except (DisprovedError, RuntimeError, ValueError, ImportError):
        return False


def _attention_error(run: ProvedRun, kernel: str) -> float:
    """The largest relative error of a kernel over causal attention and all variants of the run. Raises DisprovedError
    if one is above rounding."""
    tried = [(length, Variant()) for length in LENGTHS] + [(LENGTHS[1], variant) for variant in _variants(run)]
    limit, errors = tolerance(run.context.loaded.precision.compute), []
    for length, variant in tried:
        found = attended(run, attention_kernel(run, kernel, variant), length)
        expected = attended(run, partial(attention_reference, run, variant), length, torch.float32)
        where = f" at {length} tokens" + (f" with {variant.name}" if variant.name else "")
        errors.append(worst_error(found, expected, limit, where))
    return max(errors)


def _variants(run: ProvedRun) -> list[Variant]:
    """Each different combination of what the run's layers add to causal attention."""
    config: Any = run.context.loaded.config.get_text_config()
    packed = ("packed rows", DOCUMENTS) if run.spec.recipe.data.packing else None
    slides = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    found = []
    if packed:
        found.append(Variant(*packed))
    if slides:
        found.append(Variant("a sliding window", packed[1] if packed else (), WINDOW))
    if getattr(attention_module(run), "sinks", None) is not None:
        found = [variant._replace(sinks=True) for variant in found] + [Variant("attention sinks", sinks=True)]
    return found


def attended(
    run: ProvedRun, attend: Callable[..., Tensor], length: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output of `attend` [B, S, H, D] for inputs rounded to the run's dtype, and the gradients of the inputs. With
    `dtype`, the rounded inputs are converted to it."""
    heads, compute = heads_of(run), run.context.loaded.precision.compute
    assert heads is not None
    shapes = [(1, count, length, heads.features) for count in (heads.query, heads.key, heads.key)]
    given = [drawn(shape, compute, run, seed).to(dtype or compute) for seed, shape in enumerate(shapes)]
    query, key, value = (tensor.requires_grad_() for tensor in given)
    with torch.enable_grad():
        output = attend(query, key, value)
        upstream = drawn(tuple(output.shape), compute, run, 3).to(output.dtype)
        gradients = torch.autograd.grad(output, (query, key, value), upstream)
    names = ("the gradient of queries", "the gradient of keys", "the gradient of values")
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


def attention_kernel(run: ProvedRun, name: str, variant: Variant) -> Callable[..., Tensor]:
    """Return a function from queries, keys and values to the output of kernel `name`, called as the model's layers call
    it. Flash kernels are given the borders of documents; other kernels are given a mask if there are documents or a
    window."""
    loaded, heads = run.context.loaded, heads_of(run)
    module, flash = attention_module(run), takes_starts(name)
    assert heads is not None
    extra: dict[str, Any] = {} if heads.softcap is None else {"softcap": heads.softcap}
    if variant.window is not None:
        extra["sliding_window"] = variant.window
    if variant.sinks:
        extra["s_aux"] = module.sinks.detach().to(loaded.precision.compute)
    if variant.documents and flash:
        extra |= _starts(run, variant.documents)

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


def _starts(run: ProvedRun, documents: tuple[int, ...]) -> dict[str, Any]:
    """The keyword arguments that tell flash kernels at which positions documents of these lengths begin (transformers'
    `FlashAttentionKwargs`)."""
    with run.context.device.host_region():
        starts = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    starts_D1, longest = run.context.device.upload(starts), max(documents)
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


def attention_reference(
    run: ProvedRun, variant: Variant, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor
) -> Tensor:
    """Attention's output [B, S, H, D] by its formula (Vaswani et al. 2017, section 3.2.1). Key heads are repeated until
    there are as many as query heads."""
    heads = heads_of(run)
    assert heads is not None
    repeats = heads.query // heads.key
    key_BHSD, value_BHSD = (each.repeat_interleave(repeats, 1) for each in (key_BKSD, value_BKSD))
    scores_BHSS = query_BHSD @ key_BHSD.transpose(2, 3) * heads.scale
    if heads.softcap is not None:
        scores_BHSS = (scores_BHSS / heads.softcap).tanh() * heads.softcap
    length = query_BHSD.shape[2]
    scores_BHSS = scores_BHSS.masked_fill(~_allowed(variant, length, query_BHSD.device), float("-inf"))
    if variant.sinks:
        sinks_H = attention_module(run).sinks.detach().to(run.context.loaded.precision.compute).to(scores_BHSS.dtype)
        sinks_BHS1 = sinks_H.view(1, -1, 1, 1).expand(*scores_BHSS.shape[:3], 1)
        weights_BHSS = torch.cat([scores_BHSS, sinks_BHS1], -1).softmax(-1)[..., :-1]
    else:
        weights_BHSS = scores_BHSS.softmax(-1)
    return (weights_BHSS @ value_BHSD).transpose(1, 2)


def heads_of(run: ProvedRun) -> Heads | None:
    """The shape of the model's attention; None if neither config nor layers state it, or if queries and values have
    different widths."""
    module = attention_module(run)
    config: Any = layer_config(run.context.loaded.config.get_text_config(), module)
    query = getattr(config, "num_attention_heads", None)
    if not isinstance(query, int) or module is None or getattr(config, "kv_lora_rank", None):
        return None
    features = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // query
    groups = int(getattr(module, "num_key_value_groups", 1))
    scale = getattr(module, "scaling", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    return Heads(query, query // groups, int(features), float(scale or features**-0.5), softcap)


def attention_module(run: ProvedRun) -> Any:
    """The attention module of the decoder's first layer that has one; None if no module says that it is causal."""
    modules = decoder_of(run.context.loaded.base).modules()
    return next((module for module in modules if getattr(module, "is_causal", False)), None)


class WrappedLinear(nn.Linear):
    """A linear layer that the loss does not treat as plain, like a head with an adapter or with 4-bit weights."""


def _loss_facts(run: ProvedRun) -> list[str]:
    loss, precision = run.context.loss, run.context.loaded.precision
    head = loss.head
    trains = [name for name, parameter in head.project.named_parameters() if parameter.requires_grad]
    about_head = [head.linear is not None, head.scale, head.softcap, trains, _hidden(run)]
    return [loss.implementation, str(loss.label_smoothing), str(precision.compute), str(about_head)]


def prove_loss(run: ProvedRun) -> str:
    """Compare the loss and its gradients with the plain loss in fp32."""
    implementation, limit = run.context.loss.implementation, tolerance(run.context.loaded.precision.compute)
    worst = worst_error(_lost(run, implementation), _lost(run, None), limit)
    return f"{implementation} is within {worst:.1e} of the plain loss in fp32, also in gradients"


def _use_reference_loss(run: ProvedRun) -> str:
    loss = run.context.loss
    failed, loss.implementation = loss.implementation, "chunked"
    try:
        if failed == "chunked" or not prove_loss(run):
            loss.implementation = "plain"
    except DisprovedError:
        loss.implementation = "plain"
    return f"loss = {loss.implementation}"


def _lost(run: ProvedRun, implementation: str | None) -> dict[str, Tensor]:
    """The loss and its gradients, by name: as `implementation` computes them, or if that is None, the plain loss in
    fp32."""
    loss, loaded = run.context.loss, run.context.loaded
    compute = loaded.precision.compute
    dtype = torch.float32 if implementation is None else loaded.precision.weights
    weight_VH = drawn((VOCABULARY, _hidden(run)), compute, run, 5).to(dtype) / _hidden(run) ** 0.5
    weight_VH = weight_VH.to(compute).to(dtype)
    hidden_NH = drawn((TARGETS, _hidden(run)), compute, run, 6)
    hidden_NH = (hidden_NH.float() if implementation is None else hidden_NH).requires_grad_()
    targets_N = (drawn((TARGETS,), torch.float32, run, 7).abs() * 100).long() % VOCABULARY
    project = _head_like(run, weight_VH)
    head = OutputHead(project, loss.head.scale, loss.head.softcap)
    with torch.enable_grad():
        if implementation is None:
            total = token_losses(head.logits(hidden_NH), targets_N, loss.label_smoothing).sum()
        else:
            kernel = LossFunction(loaded, head, implementation, loss.label_smoothing, CHUNK_TOKENS)
            with autocast(loaded):
                total = kernel.sum_of_losses(targets_N, hidden_NH)
        # Half of it, as the step divides the sum by its tokens: a kernel that ignores what comes from above is caught.
        (total * 0.5).backward()
    found = {"the loss": total.detach(), "the gradient of hidden states": _present(hidden_NH.grad)}
    if project.weight.requires_grad:
        found["the gradient of the head"] = _present(project.weight.grad)
    return found


def _present(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise DisprovedError("backward leaves no gradient")
    return gradient


def _head_like(run: ProvedRun, weight_VH: Tensor) -> nn.Linear:
    """A small head that the loss treats like the run's own: plain or not, trained or frozen."""
    head = run.context.loss.head
    kind = nn.Linear if head.linear is not None else WrappedLinear
    project = kind(weight_VH.shape[1], weight_VH.shape[0], bias=False, device="meta")
    trained = any(parameter.requires_grad for parameter in head.project.parameters())
    project.weight = nn.Parameter(weight_VH, requires_grad=trained)
    return project


def _hidden(run: ProvedRun) -> int:
    return int(run.context.loaded.config.get_text_config().hidden_size)


def _dropout_applies(run: ProvedRun) -> bool:
    in_use = kernel_in_use(run.context.device.torch_device) is not None
    return in_use and bool(keyed_dropouts(run.context.loaded.model))


def prove_dropout(run: ProvedRun) -> str:
    """Compare the kernel with the reference, bit for bit, always in the same shapes and dtypes."""
    device = run.context.device.torch_device
    kernel = kernel_in_use(device)
    assert kernel is not None, "applies() was not called"
    problem = difference(kernel, reference_drop, device)
    if problem is not None:
        raise DisprovedError(problem)
    return "the masks of the dropout kernel equal the reference bit for bit"


def _use_reference_dropout(run: ProvedRun) -> str:
    stop_using(run.context.device.torch_device)
    return "dropout uses eleven kernels instead of one, and more memory"


def prove_determinism(run: ProvedRun) -> str:
    """Run attention and loss twice on the same input, with torch's deterministic algorithms on."""
    if not torch.are_deterministic_algorithms_enabled():
        raise DisprovedError("torch's deterministic algorithms are not enabled")
    if _attention_applies(run):
        kernel = attention_kernel(run, run.context.loaded.attention, Variant())
        require_repeats(lambda: attended(run, kernel, LENGTHS[1]), "attention's ")
    require_repeats(lambda: _lost(run, run.context.loss.implementation), "")
    return "attention and loss are bitwise equal in two runs"


def _use_own_code(run: ProvedRun) -> str:
    run.context.loaded.use_attention("eager")
    run.context.loss.implementation = "plain"
    return "attention = eager, loss = plain"


ATTENTION = Proof("attention", prove_attention, _use_reference_attention, _attention_applies, _attention_facts)
LOSS = Proof(
    "loss", prove_loss, _use_reference_loss, lambda run: run.context.loss.implementation != "plain", _loss_facts
)
DROPOUT = Proof("dropout", prove_dropout, _use_reference_dropout, _dropout_applies, lambda run: [])
DETERMINISM = Proof("determinism", prove_determinism, _use_own_code, lambda run: run.spec.recipe.train.deterministic)
