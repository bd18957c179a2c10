"""A vision tower in a micro-batch: what its layers and its merger hold, in bytes per row with an image of a known size.

A `Walk` goes through them with a patch as its token. What comes out is `TowerCost`; `engine.budget.step` puts it around
the decoder, which begins when the tower is done and whose backward pass ends before the tower's begins.

Try: `python -m pytest tests/budget/test_towers.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.ghost import Ghost, Walk
from engine.budget.growth import Growth, growth, maxima, packed, prune
from engine.budget.norm import rms_norm
from engine.budget.operations import FLOAT, activation, copy, linear
from engine.budget.packed import ROW, TOKEN, highest
from engine.budget.selection import Selection, select_tower_ends, tower_selections
from engine.budget.setting import Setting
from engine.budget.static import tower_layer_tensors
from engine.budget.tape import Operation
from engine.budget.tower import Tower
from engine.budget.tower_layer import TowerLayer, norm_of
from engine.budget.tower_parameters import tower_ends
from engine.budget.weights import Weights


@dataclass(frozen=True)
class Backward:
    """A moment of the tower's backward pass: gradients made so far, what is still kept, what it works with."""

    gradients: int
    kept: int
    working: tuple[int, ...]


@dataclass(frozen=True)
class TowerCost:
    """Bytes of one pass through the tower, packed; everything but `inputs` is beside them."""

    inputs: int
    """Pixels in fp32, as a processor gives them."""
    forward: tuple[int, ...]
    held: int
    """Its output, and what else the model's frame refers to until the decoder is done."""
    kept: int
    """Saved for the tower's own backward pass."""
    backward: tuple[Backward, ...]


@lru_cache(maxsize=256)
def tower_cost(arch: Architecture, setting: Setting, accumulating: bool, *, learning: bool = True) -> TowerCost:
    """The tower of `arch` at `setting.image_patches` patches a row; without `learning` nothing is kept."""
    tower, patches = arch.tower, setting.image_patches
    assert tower is not None
    chosen = tower_selections(tower, setting.patterns)
    ends = select_tower_ends(tower, setting.patterns)
    follows = learning and bool(ends.trained - {name for name in ends.trained if _is_behind(name)})
    around = _around(tower, setting)
    kept = _kept_around(tower, setting, ends, chosen) if learning and not setting.activation_offload else Growth()
    around = around.plus(kept, -1) if tower.kind != "siglip" else around
    forward, walked = [], []
    begins = follows
    for layer, selection in enumerate(chosen):
        windowed = tower.window is not None and layer not in tower.full_layers
        found = walk_tower_layer(tower, setting, selection, begins, windowed, accumulating, learning)
        forward += [peak.plus(kept).plus(around) for peak in found.forward]
        walked.append((found, kept, tower_layer_tensors(tower, setting, selection).gradients))
        if not setting.activation_offload:
            kept = kept.plus(found.saved)
        begins = begins or bool(learning and (selection.trained or selection.adapted))
    merged = _walk_merger(tower, setting, ends, begins, accumulating, learning)
    forward += [peak.plus(kept).plus(around) for peak in merged.forward]
    backward = _backward(tower, setting, ends, merged, kept, walked) if merged.backward else ()
    return TowerCost(
        inputs=FLOAT * tower.patch_values * patches * ROW,
        forward=tuple(highest({packed(peak) for peak in forward})),
        held=packed(merged.held),
        kept=packed(kept if setting.activation_offload else kept.plus(merged.saved)),
        backward=backward,
    )


def _is_behind(name: str) -> bool:
    """Whether a parameter outside the layers comes after them."""
    return "merger" in name or "projector" in name or "post_layernorm" in name


def _backward(
    tower: Tower,
    setting: Setting,
    ends: Selection,
    merged: Merged,
    kept: Growth,
    walked: list[tuple[WalkedLayer, Growth, int]],
) -> tuple[Backward, ...]:
    """The merger, then the layers from the last to the first that learns."""

    def moment(gradients: int, kept: Growth, working: tuple[Growth, ...]) -> Backward:
        return Backward(gradients, packed(kept), tuple([packed(size) for size in working]))

    moments = [moment(0, kept, merged.backward)]
    gradients = sum(p.elements * setting.base_bytes for p in tower_ends(tower) if p.name in ends.trained)
    for found, below, made in reversed(walked):
        if not found.backward:
            break
        moments.append(moment(gradients, below, found.backward))
        gradients += made
    return tuple(moments)


def _around(tower: Tower, setting: Setting) -> Growth:
    """What the tower's frames refer to from its first layer to its last."""
    if tower.kind == "siglip":  # the embeddings of patches, which the first layer gets
        return Growth(row=tower.hidden * setting.base_bytes * setting.image_patches)
    return _tables(tower, setting).plus(_cast_pixels(tower, setting))


def _kept_around(tower: Tower, setting: Setting, ends: Selection, chosen: Sequence[Selection]) -> Growth:
    """Saved beside the layers: pixels for the gradient of what takes them, tables for the rotary embedding's."""
    first = tower_ends(tower)[0].name in ends.trained
    kept = _cast_pixels(tower, setting) if first else Growth()
    turned = tower.kind != "siglip" and (first or any(layer.trained or layer.adapted for layer in chosen))
    return kept.plus(_tables(tower, setting)) if turned else kept


def _cast_pixels(tower: Tower, setting: Setting) -> Growth:
    """Pixels in the tower's dtype; those of the batch where that is theirs."""
    width = 0 if setting.base_bytes == FLOAT else setting.base_bytes
    return Growth(row=width * tower.patch_values * setting.image_patches)


def _tables(tower: Tower, setting: Setting) -> Growth:
    """Rotary tables of all patches in fp32."""
    return Growth(row=2 * FLOAT * tower.hidden // tower.heads * setting.image_patches)


class WalkedLayer(NamedTuple):
    """One layer's bytes: at its forward's maxima, kept after it, and at its backward's maxima."""

    forward: tuple[Growth, ...]
    saved: Growth
    backward: tuple[Growth, ...]


@lru_cache(maxsize=256)
def walk_tower_layer(
    tower: Tower,
    setting: Setting,
    chosen: Selection,
    follows: bool,
    windowed: bool,
    accumulating: bool,
    learning: bool,
) -> WalkedLayer:
    """Forward and backward of one layer by itself."""
    learns = learning and (follows or bool(chosen.trained or chosen.adapted))
    window = tower.window if windowed else None
    in_turn = tower.kind != "siglip" and not learns

    def sizes(peaks: Iterable[int]) -> tuple[Growth, ...]:
        found = [growth(size) for size in maxima(tuple(peaks), accumulating)]
        return prune(_by_row(size, setting.image_patches, window, one_by_one=in_turn) for size in found)

    again = setting.checkpointing and learns
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=learns, passes=again)
    layer, arguments = TowerLayer(walk, tower, setting, chosen), [_entry(walk, tower, setting, follows)]
    if again:
        held = walk.held(arguments[0])  # until the layer's backward is over
        output = walk.checkpoint(lambda: layer.forward(arguments.pop()))
        forward = sizes(walk.take_passing())
    else:
        held, output = [], layer.forward(arguments.pop())
        forward = sizes(walk.take_peaks())
        walk.casts.clear()
    if not learns:
        return WalkedLayer(forward, Growth(), ())
    assert output.node is not None
    saved, size, node = walk.live - output.size, output.size, output.node
    del output
    walk.backward(node, walk.allocate(size))
    (kept,) = sizes([saved])
    backward = sizes(walk.take_peaks())
    held.clear()
    return WalkedLayer(forward, kept, backward)


def _entry(walk: Walk, tower: Tower, setting: Setting, gradient: bool) -> Ghost:
    hidden = walk.new(tower.hidden * TOKEN, setting.base_bytes)
    if gradient:
        hidden.node = Operation(hidden.size)
    return hidden


def _by_row(size: Growth, patches: int, window: int | None, *, one_by_one: bool = False) -> Growth:
    """Bytes per patch, per pair of patches that see each other, and per position, as bytes per row.

    `one_by_one`: images, or windows, come one after the other, and no pair of the one before is left by then.
    """
    seen = min(window or patches, patches)
    fixed = size.fixed + size.position * patches
    if one_by_one:
        return Growth(fixed=fixed + size.square * seen * seen, row=size.token * patches)
    return Growth(fixed=fixed, row=size.token * patches + size.square * patches * seen)


@dataclass(frozen=True)
class Merged:
    """From the last layer's output to the decoder's tokens."""

    forward: tuple[Growth, ...]
    held: Growth
    """Referred to by the model's frame while the decoder runs, and not saved anyway."""
    saved: Growth
    backward: tuple[Growth, ...]


def _walk_merger(
    tower: Tower, setting: Setting, ends: Selection, follows: bool, accumulating: bool, learning: bool
) -> Merged:
    """Forward and backward by themselves; gradients of the tokens come as rows taken out of the decoder's input."""
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=learning)
    weights = Weights(walk, setting, ends, tower_ends(tower), transposed=False)
    held = _siglip_merger(weights, tower, _entry(walk, tower, setting, follows)) if tower.kind == "siglip" else (
        _qwen_merger(weights, tower, _entry(walk, tower, setting, follows))
    )

    def sizes(peaks: Iterable[int]) -> tuple[Growth, ...]:
        found = [growth(size) for size in maxima(tuple(peaks), accumulating)]
        return prune(_by_row(size, setting.image_patches, None) for size in found)

    forward, all_of_it = sizes(walk.take_peaks()), walk.live
    walk.casts.clear()
    output = held[-1]
    node, size = output.node, output.size
    held.clear()
    del output
    (saved,) = sizes([walk.live])
    (beside,) = sizes([all_of_it - walk.live])
    if node is None:
        return Merged(forward, beside, Growth(), ())
    taken = [walk.allocate(size), walk.allocate(size)]
    incoming = taken.pop()
    taken.clear()
    walk.backward(node, incoming)
    return Merged(forward, beside, saved, sizes(walk.take_peaks()))


def _qwen_merger(weights: Weights, tower: Tower, x: Ghost) -> list[Ghost]:
    """`PatchMerger`, in Qwen2.5-VL put back into order, and the tokens of all images joined into a copy."""
    walk, merged = weights.walk, tower.merge**2
    hidden = norm_of(weights, "model.visual.merger.ln_q", x)
    hidden = weights.linear("model.visual.merger.mlp.0", hidden, merged)
    hidden = activation(walk, hidden)
    hidden = weights.linear("model.visual.merger.mlp.2", hidden, merged)
    if tower.window is not None:
        hidden = _reordered(walk, hidden)
    return [x, hidden, copy(walk, hidden)]


def _reordered(walk: Walk, x: Ghost) -> Ghost:
    """`x[index]`: backward adds into zeros."""
    saved = walk.save(None) if x.node is not None else None
    return walk.single(x, x.elements, x.itemsize, x.size, saved)


def _siglip_merger(weights: Weights, tower: Tower, x: Ghost) -> list[Ghost]:
    """The tower's last norm, then `Gemma3MultiModalProjector`: pooled, normed in fp32, projected."""
    walk = weights.walk
    last = norm_of(weights, "model.vision_tower.post_layernorm", x)
    del x
    laid_out = copy(walk, last)
    pooled = _pooled(walk, laid_out, -(-tower.hidden // tower.merge**2) * TOKEN)
    size, trained = weights.weight("model.multi_modal_projector.mm_soft_emb_norm")
    normed = rms_norm(walk, pooled, TOKEN, size, trained, weights.setting.base_bytes, wide=True)
    size, trained = weights.parameter("model.multi_modal_projector.mm_input_projection_weight")
    projected = linear(walk, normed, -(-tower.output // tower.merge**2), size, trained)
    return [last, projected]


def _pooled(walk: Walk, x: Ghost, elements: int) -> Ghost:
    """`avg_pool2d`: saves its input."""
    saved = walk.save(x) if x.node is not None else None
    return walk.single(x, elements, x.itemsize, x.size, saved)
