"""Passes without gradients that a training run makes: evaluation, and generation with its cache of keys and values.

Optimizer state stays where it is meanwhile, gradients are gone. Evaluation takes micro-batches of training's size and
never keeps logits; generation starts with many rows and halves them when memory runs out, as `engine.evaluate` does.
Where ranks share sequences the first one does this alone, with whole ones.

Try: `python -m pytest tests/budget/test_inference.py`
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.ghost import Walk
from engine.budget.growth import Growth, growth, prune, shape_of
from engine.budget.head import Head
from engine.budget.kinds import Kind, kinds_of
from engine.budget.layer import Layer
from engine.budget.operations import FLOAT
from engine.budget.setting import Setting
from engine.budget.step import embeddings_held, entry, inputs
from engine.budget.vision import tower_cost
from engine.spec.recipe import Recipe

GENERATION_ROWS = 64
"""Answers generated at once to begin with; `engine.evaluate.scores` says the same."""


def evaluates(recipe: Recipe) -> bool:
    """Whether training stops to evaluate: at the latest once at its end, when there is data to do it on."""
    return bool(recipe.data.validation) or recipe.data.valid_fraction > 0


def generates(recipe: Recipe) -> bool:
    """Whether these evaluations write text."""
    return evaluates(recipe) and ("exact_match" in recipe.eval.metrics or recipe.eval.samples > 0)


@lru_cache(maxsize=256)
def evaluation(arch: Architecture, setting: Setting) -> tuple[Growth, ...]:
    """Live sets of a forward pass and its loss, above what the run holds anyway."""
    setting = replace(setting, checkpointing=False, dropout=False, sequence=1)
    batch, kinds = inputs(arch, setting, kinds_of(arch, setting)), kinds_of(arch, setting)
    embeddings = embeddings_held(arch, setting, learning=False)
    held = embeddings if arch.layers > 1 else Growth()
    layers = [batch.plus(held).plus(peak) for kind in set(kinds) for peak in _forward(arch, setting, kind)]
    walk = Walk(metered=setting.metered, learning=False)
    arguments = [entry(walk, arch, setting, False)]
    Head(walk, arch, setting).forward(arguments.pop())
    after = inputs(arch, setting, ())
    return prune(_behind_tower(arch, setting, [*layers, *(after.plus(growth(size)) for size in walk.take_peaks())]))


def _behind_tower(arch: Architecture, setting: Setting, peaks: list[Growth]) -> list[Growth]:
    """Those of the decoder, and where there are images those of the tower before it, whose output is held meanwhile."""
    if not setting.image_patches:
        return peaks
    tower = tower_cost(arch, setting, False, learning=False)
    embedded = Growth(token=arch.hidden * setting.base_bytes)
    through = [peak.plus(tower.inputs).plus(tower.held) for peak in peaks]
    return through + [peak.plus(tower.inputs).plus(embedded) for peak in tower.forward]


@lru_cache(maxsize=256)
def _forward(arch: Architecture, setting: Setting, kind: Kind, caching: bool = False) -> tuple[Growth, ...]:
    """Local maxima of one layer's forward pass; with the cache it writes among them."""
    walk = Walk(metered=setting.metered, learning=False)
    layer = Layer(walk, arch, setting, kind)
    layer.cached = [] if caching else None
    arguments = [entry(walk, arch, setting, False)]
    output = layer.forward(arguments.pop())
    del output
    return prune(growth(size) for size in walk.take_peaks())


@lru_cache(maxsize=256)
def generation_bytes(arch: Architecture, setting: Setting, *, rows: int, prompt: int, new_tokens: int) -> int:
    """Bytes above what the run holds anyway, for `rows` prompts of `prompt` tokens and answers of `new_tokens`."""
    return max(_prefill(arch, setting, rows, prompt), _decoding(arch, setting, rows, prompt, new_tokens))


def _prefill(arch: Architecture, setting: Setting, rows: int, prompt: int) -> int:
    """The pass over the prompts, padded on the left and therefore masked: deepest layer of each kind, cache so far."""
    shape = shape_of(rows, prompt + 1, setting.chunk_tokens)
    kinds, masked = _generating(arch, setting)
    batch = inputs(arch, masked, kinds).plus(embeddings_held(arch, masked, learning=False))
    deepest = {kind: layer for layer, kind in enumerate(kinds)}
    per_layer = Growth(token=2 * arch.kv_width * setting.base_bytes)
    peaks = [
        batch.plus(per_layer, layer).plus(peak)
        for kind, layer in deepest.items()
        for peak in _forward(arch, masked, kind, True)
    ]
    return max(peak.at(shape) for peak in _behind_tower(arch, masked, peaks)) + rows * INPUT_COPIES * (prompt + 1)


def _decoding(arch: Architecture, setting: Setting, rows: int, prompt: int, new_tokens: int) -> int:
    """The last token of an answer: the whole cache, one layer's twice while it grows, and logits of one position.

    Logits are there in the model's dtype and, for the choice, twice in fp32.
    """
    total = prompt + new_tokens
    lengths = [
        min(total, arch.sliding_window) if arch.sliding_window and slides else total
        for slides in arch.sliding_layers or (False,) * arch.layers
    ]
    per_token = 2 * arch.kv_width * setting.base_bytes
    cache = sum(lengths) * per_token + max(lengths) * per_token
    if setting.attention == "eager" and arch.heads > arch.kv_heads:  # one layer's keys and values for all heads
        cache += 2 * total * arch.query_width * setting.base_bytes
    pixels = FLOAT * arch.tower.patch_values * setting.image_patches if arch.tower else 0  # kept to the last token
    return rows * (cache + pixels + arch.vocab * (setting.base_bytes + 2 * FLOAT) + INPUT_COPIES * total)


INPUT_COPIES = 24
"""Per position of a row: ids and mask (int64), and one more while they grow."""


def _generating(arch: Architecture, setting: Setting) -> tuple[tuple[Kind, ...], Setting]:
    """Kinds of layers, and the setting, while prompts padded on the left are read."""
    masked = replace(setting, checkpointing=False, dropout=False, packed=True, sequence=1)
    return kinds_of(arch, masked), masked


def generation_rows(arch: Architecture, setting: Setting, recipe: Recipe, *, length: int, room_bytes: int) -> int:
    """How many answers at once: GENERATION_ROWS, halved until they fit into `room_bytes`; at least one."""
    rows = GENERATION_ROWS if "exact_match" in recipe.eval.metrics else min(GENERATION_ROWS, recipe.eval.samples)
    new_tokens = recipe.generate.max_new_tokens
    while rows > 1:
        if generation_bytes(arch, setting, rows=rows, prompt=length, new_tokens=new_tokens) <= room_bytes:
            break
        rows //= 2
    return rows
