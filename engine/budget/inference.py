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
from engine.budget.kinds import Kind, stack_of
from engine.budget.layer import Layer
from engine.budget.operations import FLOAT
from engine.budget.setting import Setting
from engine.budget.step import embeddings_held, inputs, masks_of
from engine.budget.vision import tower_cost
from engine.budget.walks import entry, felt_by_head, felt_by_layers, head_alone, pass_through
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
    setting = setting._replace(checkpointing=False, dropout=False, sequence=1)
    stack, felt = stack_of(arch, setting), felt_by_layers(setting)
    around = inputs(arch, setting, masks_of(arch, setting, stack.kinds))
    if arch.layers > 1:
        around = around.plus(embeddings_held(arch, setting, learning=False))
    largest = [kind for kind in stack.kinds if stack.larger(kind) is None]
    through = {size for kind in largest for size in pass_through(arch, felt, kind, learning=False).forward}
    layers = [around.plus(size) for size in growths(through)]
    after = inputs(arch, setting, 0)
    head = [after.plus(size) for size in growths(head_alone(arch, felt_by_head(setting)))]
    return tuple(_behind_tower(arch, setting, [*layers, *head]))


def _behind_tower(arch: Architecture, setting: Setting, peaks: list[Growth]) -> list[Growth]:
    """Those of the decoder, and where there are images those of the tower before it, whose output is held meanwhile."""
    if not setting.image_patches:
        return peaks
    tower = tower_cost(arch, setting, False, learning=False)
    embedded = Growth(token=arch.hidden * setting.base_bytes)
    through = [peak.plus(tower.inputs).plus(tower.held) for peak in peaks]
    return through + [peak.plus(tower.inputs).plus(embedded) for peak in tower.forward]


@lru_cache(maxsize=256)
def _caching(arch: Architecture, setting: Setting, kind: Kind) -> tuple[Growth, ...]:
    """Local maxima of one layer's forward pass that writes keys and values into the cache, these included."""
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=False)
    layer = Layer(walk, arch, setting, kind)
    layer.cached = []
    arguments = [entry(walk, arch, setting, False)]
    output = layer.forward(arguments.pop())
    del output
    return growths(walk.take_peaks())


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
    masked = setting._replace(checkpointing=False, dropout=False, packed=True, sequence=1)
    stack = stack_of(arch, masked)
    batch = inputs(arch, masked, masks_of(arch, masked, stack.kinds))
    batch = batch.plus(embeddings_held(arch, masked, learning=False))
    per_layer = Growth(token=2 * arch.kv_width * setting.base_bytes)
    peaks = [
        batch.plus(per_layer, layer).plus(peak)
        for kind, layer in stack.highest().items()
        for peak in _caching(arch, felt_by_layers(masked), kind._replace(follows=False))
    ]
    return tuple(_behind_tower(arch, masked, peaks))


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


def generation_rows(arch: Architecture, setting: Setting, recipe: Recipe, *, length: int, room_bytes: int) -> int:
    """How many answers at once: GENERATION_ROWS, halved until they fit into `room_bytes`; at least one."""
    rows = GENERATION_ROWS if "exact_match" in recipe.eval.metrics else min(GENERATION_ROWS, recipe.eval.samples)
    new_tokens = recipe.generate.max_new_tokens
    while rows > 1:
        if generation_bytes(arch, setting, rows=rows, prompt=length, new_tokens=new_tokens) <= room_bytes:
            break
        rows //= 2
    return rows
