"""Passes without gradients that a training run makes: evaluation, and generation with its cache of keys and values.

Optimizer state stays where it is meanwhile, gradients are gone. Evaluation takes micro-batches of training's size and
never keeps logits; generation starts with many rows and halves them when memory runs out, as `engine.evaluate` does.
Where ranks share sequences the first one does this alone, with whole ones.

Try: `python -m pytest tests/budget/test_inference.py`
"""

from __future__ import annotations

from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.ghost import Walk
from engine.budget.growth import Growth, growths, shape_of
from engine.budget.installed import DECODES_WITH_REPEATED_HEADS
from engine.budget.kinds import Kind, kind_of, stack_of
from engine.budget.layer import Layer
from engine.budget.operations import FLOAT
from engine.budget.packed import TOKEN, highest
from engine.budget.setting import Setting
from engine.budget.step import embeddings_held, inputs, masks_of
from engine.budget.vision import tower_cost
from engine.budget.walks import at_rest, entry, felt_by_head, felt_by_layers, head_alone, pass_through
from engine.spec.schema.recipe import Recipe

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
    stack = stack_of(arch, setting)
    passes = {kind: pass_through(arch, setting, kind) for kind in stack.kinds if not stack.larger[kind]}
    run, setting = setting, at_rest(setting)
    around = inputs(arch, setting, masks_of(setting, stack.kinds))
    if arch.layers > 1:
        around += embeddings_held(arch, setting, learning=False)

    def casts(layer: int) -> int:
        """Packed bytes of weights that autocast has cast by then, and keeps until the pass is over."""
        if not setting.autocast:
            return 0
        below = stack.between(0, layer)
        return sum(count * pass_through(arch, run, kind).casts for kind, count in below)

    highest = stack.highest()
    through = tuple(size + casts(highest[kind]) for kind in passes for size in passes[kind].forward)
    after = inputs(arch, setting, 0) + casts(arch.layers)
    head = head_alone(arch, felt_by_head(setting))
    peaks = [around + size for size in through] + [after + size for size in head]
    return growths(_behind_tower(arch, setting, peaks))


def _behind_tower(arch: Architecture, setting: Setting, peaks: list[int]) -> list[int]:
    """Those of the decoder, and where there are images those of the tower before it, whose output is held meanwhile."""
    if not setting.image_patches:
        return peaks
    tower = tower_cost(arch, setting, False, learning=False)
    before = tower.inputs + arch.hidden * setting.base_bytes * TOKEN
    return [peak + tower.inputs + tower.held for peak in peaks] + [before + peak for peak in tower.forward]


@lru_cache(maxsize=256)
def _caching(arch: Architecture, setting: Setting, kind: Kind) -> tuple[int, ...]:
    """Local maxima of one layer's forward pass that writes keys and values into the cache, these included."""
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=False)
    layer = Layer(walk, arch, setting, kind)
    layer.cached = []
    arguments = [entry(walk, arch, setting, False)]
    output = layer.forward(arguments.pop())
    del output
    return tuple(highest(walk.take_peaks()))


def generation_bytes(arch: Architecture, setting: Setting, *, rows: int, prompt: int, new_tokens: int) -> int:
    """Bytes above what the run holds anyway, for `rows` prompts of `prompt` tokens and answers of `new_tokens`."""
    return max(_prefill(arch, setting, rows, prompt), _decoding(arch, setting, rows, prompt, new_tokens))


def _prefill(arch: Architecture, setting: Setting, rows: int, prompt: int) -> int:
    """The pass over the prompts."""
    shape = shape_of(rows, prompt + 1, setting.chunk_tokens)
    return max(peak.at(shape) for peak in _prefilling(arch, setting)) + rows * INPUT_COPIES * (prompt + 1)


@lru_cache(maxsize=256)
def _prefilling(arch: Architecture, setting: Setting) -> tuple[Growth, ...]:
    """Prompts are padded on the left and therefore masked. Of each kind the deepest layer, and the cache so far."""
    # Autocast is for losses: text is generated in the weights' own dtype.
    masked = setting.but(checkpointing=False, dropout=False, packed=True, sequence=1, autocast=False)
    stack = stack_of(arch, masked)
    batch = inputs(arch, masked, masks_of(masked, stack.kinds))
    batch += embeddings_held(arch, masked, learning=False)
    per_layer = 2 * arch.kv_width * setting.base_bytes * TOKEN
    peaks = [
        batch + layer * per_layer + peak
        for kind, layer in stack.highest().items()
        for peak in _caching(arch, felt_by_layers(masked), kind_of(kind.chosen, kind.masked, kind.slides, False))
    ]
    return growths(_behind_tower(arch, masked, peaks))


def _decoding(arch: Architecture, setting: Setting, rows: int, prompt: int, new_tokens: int) -> int:
    """The last token of an answer: the whole cache, and the most that comes on top of it.

    That is a layer's keys or values twice while they grow (both, of a window), or in eager attention scores, and keys
    and values for all heads, beside the fp32 logits of the token before; or the logits of both tokens, of the last in
    the model's dtype, too. Prompts of several rows are padded, and therefore masked.
    """
    total, window = prompt + new_tokens, arch.sliding_window
    half = arch.kv_width * setting.base_bytes
    windowed = [bool(window and slides) for slides in arch.sliding_layers or (False,) * arch.layers]
    lengths = [min(total, window) if slides and window else total for slides in windowed]
    growing = max(half * length * (1 + slides) for slides, length in zip(windowed, lengths, strict=True))
    repeated = 0
    wide = 2 * arch.query_width * setting.base_bytes if arch.heads > arch.kv_heads else 0
    if setting.attention == "eager":
        repeated = max(lengths) * (wide + 2 * arch.heads * FLOAT)
    elif setting.attention == "sdpa" and DECODES_WITH_REPEATED_HEADS and rows > 1 and arch.kv_heads > 1:
        repeated = max(lengths) * wide
    logits = arch.vocab * FLOAT
    on_top = max(growing + logits, repeated + logits, 2 * logits + arch.vocab * setting.base_bytes)
    pixels = FLOAT * arch.tower.patch_values * setting.image_patches if arch.tower else 0  # kept to the last token
    return rows * (2 * half * sum(lengths) + on_top + pixels + INPUT_COPIES * total)


INPUT_COPIES = 24
"""Per position of a row: ids and mask (int64), and one more while they grow."""


def most_answers(recipe: Recipe) -> int:
    """How many answers the engine would write at once if there were room: those that are asked for, up to a bound."""
    return GENERATION_ROWS if "exact_match" in recipe.eval.metrics else min(GENERATION_ROWS, recipe.eval.samples)


def generation_rows(arch: Architecture, setting: Setting, recipe: Recipe, *, length: int, room_bytes: int) -> int:
    """How many answers at once: GENERATION_ROWS, halved until they fit into `room_bytes`; at least one."""
    rows = most_answers(recipe)
    new_tokens = recipe.generate.max_new_tokens
    while rows > 1:
        if generation_bytes(arch, setting, rows=rows, prompt=length, new_tokens=new_tokens) <= room_bytes:
            break
        rows //= 2
    return rows
