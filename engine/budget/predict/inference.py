"""Memory of passes without gradients in a training run: evaluation, and generation with its key-value (KV) cache.

Optimizer state stays on the device during these passes; gradients do not exist. Evaluation uses micro-batches of
training's size. With sequence parallelism, rank 0 evaluates alone, on whole sequences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.budget.predict.layer_traces import (
    Sizes,
    caching_forward,
    inference_config,
    inference_forward,
    inference_head,
    layer_config,
)
from engine.budget.predict.step import embeddings_held, inputs, masks_of
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.layer import layer_stack
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.budget.trace.polynomial import NO_BYTES, TOKEN, BytesPolynomial, highest, highest_value, shape_of
from engine.config.files.machine import installed, older
from engine.config.schema.recipe import Generate, Recipe

GENERATION_ROWS = 64
"""Most answers that one device generates at once, and the number that it tries first."""

DECODES_WITH_REPEATED_HEADS = older(installed("transformers"), "5.23")
"""Before 5.23, sdpa with a mask made copies of cached keys and values for all heads, also for a single new token."""


def evaluates(recipe: Recipe) -> bool:
    """Whether a run evaluates: whenever it has validation data, at least once at the end."""
    return bool(recipe.data.validation) or recipe.data.valid_fraction > 0


def generates(recipe: Recipe) -> bool:
    """Whether evaluations generate text."""
    asked = recipe.eval
    return evaluates(recipe) and ("exact_match" in asked.metrics or asked.samples > 0 or bool(asked.prompts))


@lru_cache(maxsize=256)
def evaluation(arch: Architecture, config: MemoryConfig) -> Sizes:
    """Live bytes of a forward pass and its loss, above the static bytes, at each moment that may be the peak."""
    stack = layer_stack(arch, config)
    passes = {kind: inference_forward(arch, config, kind) for kind in stack.kinds}
    config = inference_config(config)
    around = inputs(arch, config, masks_of(config, stack.kinds))
    if arch.layers > 1:
        around += embeddings_held(arch, config, None)

    def casts(layer: int) -> BytesPolynomial:
        """Bytes of the half-precision copies of weights in all layers before `layer`; autocast caches them until the
        pass is over."""
        return sum([count * passes[kind].casts for kind, count in stack.counts(0, layer).items()], NO_BYTES)

    kinds = [kind for kind in stack.kinds if not stack.larger(kind)]
    peaks = [around + casts(stack.spans[kind][1]) + size for kind in kinds for size in passes[kind].forward]
    after = inputs(arch, config, 0) + casts(arch.layers)
    peaks += [after + size for size in inference_head(arch, config)]
    return highest(_behind_vision(arch, config, peaks))


def _behind_vision(arch: Architecture, config: MemoryConfig, peaks: list[BytesPolynomial]) -> list[BytesPolynomial]:
    """The decoder's peaks, with images plus the pixels and the encoder's output, which stay allocated; and the peaks
    of the encoder, which runs before."""
    if not config.image_patches:
        return peaks
    encoder = vision_cost(arch, config, False, learning=False)
    before = encoder.inputs + arch.hidden * config.base_bytes * TOKEN
    return [peak + encoder.inputs + encoder.held for peak in peaks] + [before + peak for peak in encoder.forward]


def generation_bytes(arch: Architecture, config: MemoryConfig, *, rows: int, prompt: int, generate: Generate) -> int:
    """Peak bytes, above the static bytes, of generating answers of full length to `rows` prompts of `prompt` tokens."""
    return max(_prefill(arch, config, rows, prompt), _decoding(arch, config, rows, prompt, generate))


def _prefill(arch: Architecture, config: MemoryConfig, rows: int, prompt: int) -> int:
    shape = shape_of(rows, prompt + 1, config.chunk_tokens, patches=rows * config.image_patches)
    return highest_value(_prefilling(arch, config, rows > 1), shape) + rows * INPUT_COPIES * (prompt + 1)


@lru_cache(maxsize=256)
def _prefilling(arch: Architecture, config: MemoryConfig, padded: bool) -> Sizes:
    """Live bytes of the forward pass over the prompts. Of each kind of layer only the last one counts, because the
    cache of all earlier layers exists by then. `padded`: there are several prompts, which are padded on the left and
    therefore masked."""
    # Text is generated in the weights' own dtype. (Under autocast with flash attention, where it takes less.)
    config = replace(inference_config(config), packed=padded, autocast=False)
    stack = layer_stack(arch, config)
    batch = inputs(arch, config, masks_of(config, stack.kinds)) + embeddings_held(arch, config, None)
    per_layer = 2 * arch.kv_width * config.base_bytes * TOKEN
    peaks = [
        batch + layer * per_layer + peak
        for kind, (_, layer) in stack.spans.items()
        for peak in caching_forward(arch, layer_config(config), kind._replace(follows=False))
    ]
    return highest(_behind_vision(arch, config, peaks))


def _decoding(arch: Architecture, config: MemoryConfig, rows: int, prompt: int, generate: Generate) -> int:
    """Bytes above the static bytes at the last token of an answer: all of the key-value cache, plus the largest of four
    moments.

    1. The cache grows: one layer's keys or values exist twice (keys and values if the layer has a sliding window), and
       so do the previous token's fp32 logits.
    2. Attention: keys and values repeated for all heads, with eager attention also the scores; and the same logits.
    3. The head: fp32 logits of the previous and of this token, and this token's logits in the model's dtype.
    4. Sampling: this token's logits in the model's dtype, and what `_scores_bytes` counts.

    Prompts of several rows are padded and therefore masked.
    """
    total, half = prompt + generate.max_new_tokens, arch.kv_width * config.base_bytes
    lengths = _cached_lengths(arch, total)
    windowed = [bool(arch.sliding_window and slides) for slides in arch.sliding_layers or (False,) * arch.layers]
    growing = max(half * length * (1 + slides) for slides, length in zip(windowed, lengths, strict=True))
    repeated = 0
    wide = 2 * arch.query_width * config.base_bytes if arch.heads > arch.kv_heads else 0
    if config.attention == "eager":
        repeated = max(lengths) * (wide + 2 * arch.heads * FLOAT)
    elif config.attention == "sdpa" and DECODES_WITH_REPEATED_HEADS and rows > 1 and arch.kv_heads > 1:
        repeated = max(lengths) * wide
    logits = arch.vocab * FLOAT
    chosen_from = arch.vocab * (config.base_bytes + _scores_bytes(generate))
    on_top = max(growing + logits, repeated + logits, chosen_from)
    pixels = (
        FLOAT * arch.vision_encoder.patch_values * config.image_patches if arch.vision_encoder else 0
    )  # the processor's pixels stay allocated until the last token
    return rows * (cache_bytes(arch, config, total) + on_top + pixels + INPUT_COPIES * total)


def cache_bytes(arch: Architecture, config: MemoryConfig, tokens: int) -> int:
    """Bytes of the key-value cache of one row of `tokens` tokens, prompt and answer."""
    return 2 * arch.kv_width * config.base_bytes * sum(_cached_lengths(arch, tokens))


def _cached_lengths(arch: Architecture, tokens: int) -> list[int]:
    """How many of `tokens` tokens each layer's cache holds: all, or those of its sliding window."""
    window, slides = arch.sliding_window, arch.sliding_layers or (False,) * arch.layers
    return [min(tokens, window) if window and sliding else tokens for sliding in slides]


def _scores_bytes(generate: Generate) -> int:
    """Bytes per token of the vocabulary that the choice of one row's next token takes beside the model's own logits."""
    if generate.temperature == 0.0:
        # fp32 logits of the previous and of this token; a repetition penalty makes a copy of each.
        return (4 if generate.repetition_penalty != 1.0 else 2) * FLOAT
    if generate.top_p == 1.0:
        # This token's logits, the scores of the previous and of this token, their softmax and its sums.
        return 5 * FLOAT
    # These logits and scores, sorted scores with int64 indices, sums, two masks, and the scores that are left.
    return 6 * FLOAT + 8 + 2


INPUT_COPIES = 24
"""Bytes per token of ids and mask (int64), and of the copy that is made to append a token to one of them."""


def most_answers(recipe: Recipe) -> int:
    """Answers of an evaluation that are generated at once; a file of prompts may hold any number."""
    asked, prompts = recipe.eval, recipe.eval.prompts
    own = min(GENERATION_ROWS, len(prompts)) if isinstance(prompts, list) else GENERATION_ROWS
    samples = GENERATION_ROWS if "exact_match" in asked.metrics else asked.samples
    return max(own, min(GENERATION_ROWS, samples, asked.limit or GENERATION_ROWS))


def generation_rows(arch: Architecture, config: MemoryConfig, recipe: Recipe, *, length: int, room_bytes: int) -> int:
    """`most_answers` to prompts of `length` tokens, halved until they fit into `room_bytes`; at least one."""
    rows = most_answers(recipe)
    while rows > 1:
        if generation_bytes(arch, config, rows=rows, prompt=length, generate=recipe.generate) <= room_bytes:
            break
        rows //= 2
    return rows
