"""Memory of the passes without gradients in a training run: evaluation, and generation with its cache of keys and
values.

Optimizer state stays on the device during these passes; there are no gradients. Evaluation takes micro-batches of
training's size and never keeps logits. Generation starts with many rows and halves their number when memory runs out,
as `engine.evaluate` does. Where ranks share sequences, rank 0 evaluates alone, with whole sequences.

Try: `python -m pytest tests/budget/test_inference.py`
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.installed import DECODES_WITH_REPEATED_HEADS
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
from engine.budget.trace.layer_kinds import layer_stack
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.budget.trace.polynomial import NO_BYTES, TOKEN, BytesPolynomial, highest, highest_value, shape_of
from engine.spec.schema.recipe import Recipe

GENERATION_ROWS = 64
"""Answers that generation starts with at once; the same number as in `engine.evaluate.scores`."""


def evaluates(recipe: Recipe) -> bool:
    """Whether training stops to evaluate: at the latest once at its end, when there is data to do it on."""
    return bool(recipe.data.validation) or recipe.data.valid_fraction > 0


def generates(recipe: Recipe) -> bool:
    """Whether the evaluations inside training generate text."""
    return evaluates(recipe) and ("exact_match" in recipe.eval.metrics or recipe.eval.samples > 0)


@lru_cache(maxsize=256)
def evaluation(arch: Architecture, config: MemoryConfig) -> Sizes:
    """Live sets of a forward pass and its loss, above what the run holds anyway."""
    stack = layer_stack(arch, config)
    passes = {kind: inference_forward(arch, config, kind) for kind in stack.kinds}
    config = inference_config(config)
    around = inputs(arch, config, masks_of(config, stack.kinds))
    if arch.layers > 1:
        around += embeddings_held(arch, config, learning=False)

    def casts(layer: int) -> BytesPolynomial:
        """The weights that autocast has cast up to this layer, and keeps until the pass is over."""
        return sum([count * passes[kind].casts for kind, count in stack.counts(0, layer).items()], NO_BYTES)

    kinds = [kind for kind in stack.kinds if not stack.larger(kind)]
    peaks = [around + casts(stack.spans[kind][1]) + size for kind in kinds for size in passes[kind].forward]
    after = inputs(arch, config, 0) + casts(arch.layers)
    peaks += [after + size for size in inference_head(arch, config)]
    return highest(_behind_vision(arch, config, peaks))


def _behind_vision(arch: Architecture, config: MemoryConfig, peaks: list[BytesPolynomial]) -> list[BytesPolynomial]:
    """Peaks of the decoder, with images those of the vision encoder before it, whose output is held meanwhile."""
    if not config.image_patches:
        return peaks
    encoder = vision_cost(arch, config, False, learning=False)
    before = encoder.inputs + arch.hidden * config.base_bytes * TOKEN
    return [peak + encoder.inputs + encoder.held for peak in peaks] + [before + peak for peak in encoder.forward]


def generation_bytes(arch: Architecture, config: MemoryConfig, *, rows: int, prompt: int, new_tokens: int) -> int:
    """Bytes above what the run holds anyway, for `rows` prompts of `prompt` tokens and answers of `new_tokens`."""
    return max(_prefill(arch, config, rows, prompt), _decoding(arch, config, rows, prompt, new_tokens))


def _prefill(arch: Architecture, config: MemoryConfig, rows: int, prompt: int) -> int:
    """Bytes of the forward pass over the prompts."""
    shape = shape_of(rows, prompt + 1, config.chunk_tokens)
    return highest_value(_prefilling(arch, config), shape) + rows * INPUT_COPIES * (prompt + 1)


@lru_cache(maxsize=256)
def _prefilling(arch: Architecture, config: MemoryConfig) -> Sizes:
    """Maxima of the pass over the prompts, which are padded on the left and therefore masked: for each kind of layer
    those of its last layer, with the cache written so far."""
    # Autocast is for losses: text is generated in the weights' own dtype.
    config = replace(inference_config(config), packed=True, autocast=False)
    stack = layer_stack(arch, config)
    batch = inputs(arch, config, masks_of(config, stack.kinds)) + embeddings_held(arch, config, learning=False)
    per_layer = 2 * arch.kv_width * config.base_bytes * TOKEN
    peaks = [
        batch + layer * per_layer + peak
        for kind, (_, layer) in stack.spans.items()
        for peak in caching_forward(arch, layer_config(config), kind._replace(follows=False))
    ]
    return highest(_behind_vision(arch, config, peaks))


def _decoding(arch: Architecture, config: MemoryConfig, rows: int, prompt: int, new_tokens: int) -> int:
    """Bytes at the last token of an answer: the whole cache, and the largest of three working sets.

    They are: a layer's keys or values twice while they grow (both of them in a layer with a window), beside the fp32
    logits of the token before; in eager attention, scores and keys and values for all heads, beside the same; or the
    logits of both tokens, with those of the last in the model's dtype in addition. Prompts of several rows are padded,
    and therefore masked.
    """
    total, window = prompt + new_tokens, arch.sliding_window
    half = arch.kv_width * config.base_bytes
    windowed = [bool(window and slides) for slides in arch.sliding_layers or (False,) * arch.layers]
    lengths = [min(total, window) if slides and window else total for slides in windowed]
    growing = max(half * length * (1 + slides) for slides, length in zip(windowed, lengths, strict=True))
    repeated = 0
    wide = 2 * arch.query_width * config.base_bytes if arch.heads > arch.kv_heads else 0
    if config.attention == "eager":
        repeated = max(lengths) * (wide + 2 * arch.heads * FLOAT)
    elif config.attention == "sdpa" and DECODES_WITH_REPEATED_HEADS and rows > 1 and arch.kv_heads > 1:
        repeated = max(lengths) * wide
    logits = arch.vocab * FLOAT
    on_top = max(growing + logits, repeated + logits, 2 * logits + arch.vocab * config.base_bytes)
    pixels = (
        FLOAT * arch.vision_encoder.patch_values * config.image_patches if arch.vision_encoder else 0
    )  # kept to the last token
    return rows * (2 * half * sum(lengths) + on_top + pixels + INPUT_COPIES * total)


INPUT_COPIES = 24
"""Bytes per position of a row: ids and mask (int64), and a third such tensor while one of them grows."""


def most_answers(recipe: Recipe) -> int:
    """How many answers the engine generates at once where memory allows: as many as the recipe asks for, up to a
    bound."""
    return GENERATION_ROWS if "exact_match" in recipe.eval.metrics else min(GENERATION_ROWS, recipe.eval.samples)


def generation_rows(arch: Architecture, config: MemoryConfig, recipe: Recipe, *, length: int, room_bytes: int) -> int:
    """How many answers at once: GENERATION_ROWS, halved until they fit into `room_bytes`; at least one."""
    rows = most_answers(recipe)
    new_tokens = recipe.generate.max_new_tokens
    while rows > 1:
        if generation_bytes(arch, config, rows=rows, prompt=length, new_tokens=new_tokens) <= room_bytes:
            break
        rows //= 2
    return rows
