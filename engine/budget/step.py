"""One micro-batch, phase by phase: a walk through one layer and one through the head, put together for all layers.

Every phase is a set of candidate live sizes above the static bytes; its peak at a shape is the largest of them there.
Between phases only arithmetic is needed: while a layer is differentiated, those before it hold what they saved and
those after it hold their gradients.

Try: `python -m pytest tests/budget/test_step.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.ghost import TOKEN, Ghost, Node, Walk
from engine.budget.growth import Growth, PhaseCost, Walked, growth, prune
from engine.budget.head import Head
from engine.budget.kinds import Kind, body_learns, kinds_of, sees_images_both_ways
from engine.budget.layer import Layer
from engine.budget.operations import FLOAT, INDEX
from engine.budget.setting import Setting
from engine.budget.sharing import ALONE, Sharing, buffers
from engine.budget.static import layer_tensors, static_bytes
from engine.budget.vision import tower_cost

INPUT_BYTES = 24
"""Per token: input ids, labels and the targets among them, int64."""


@lru_cache(maxsize=256)
def step_cost(
    arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing = ALONE
) -> dict[str, tuple[PhaseCost, ...]]:
    """Phases of one micro-batch, each as alternatives of which the largest counts.

    `accumulating` when an earlier micro-batch of the same step has left gradients.
    """
    phases = _phases(arch, setting, accumulating, sharing)
    if setting.image_patches:
        phases = _with_tower(phases, arch, setting, accumulating, sharing)
    return {
        name: tuple(replace(cost, buffers=buffers(arch, setting, sharing, name)) for cost in costs)
        for name, costs in phases.items()
    }


def _phases(
    arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing
) -> dict[str, tuple[PhaseCost, ...]]:
    """The same without the buffers of communication."""
    static = static_bytes(arch, setting)
    everything, table = sharing.part(static.total.gradients), static.embedding_gradient
    held = everything if accumulating else 0
    # A tied table gets its gradient from both ends; autograd keeps the head's until the embedding's has come.
    waiting = table if arch.tied else 0
    kept, kinds = _kept(arch, setting, accumulating), kinds_of(arch, setting)
    batch = inputs(arch, setting, _recomputed(setting, kinds))
    through = kept[-1].plus(_casts(arch, setting, accumulating)[-1])
    head = PhaseCost(held, through, walk_head(arch, setting, accumulating), "loss", batch)
    phases = {"forward": _forward(arch, setting, accumulating, held), "loss_backward": (head,)}
    early = held + waiting if accumulating else sharing.part(static.head_gradient) + waiting
    phases |= _backward(arch, setting, accumulating, early, sharing)
    if table:
        # Tied: the head's gradient, the embedding's, and their sum are live at once.
        before = held + waiting if accumulating else everything - (0 if arch.tied else sharing.part(table))
        working = Growth((2 if arch.tied else 1) * table, arch.hidden * setting.base_bytes)
        batch = inputs(arch, setting, ())
        phases["embedding_backward"] = (PhaseCost(before, Growth(), (working,), "gradients", batch),)
    return phases


def _with_tower(
    phases: dict[str, tuple[PhaseCost, ...]], arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing
) -> dict[str, tuple[PhaseCost, ...]]:
    """The same with images: the tower goes first, its output and what it keeps are held meanwhile, and its backward
    pass comes when gradients have reached the decoder's input, where they wait if the embeddings learn, too."""
    static, tower = static_bytes(arch, setting), tower_cost(arch, setting, accumulating)
    images = tower.inputs.plus(Growth(token=INDEX if sees_images_both_ways(arch, setting) else 3 * INDEX))
    around: dict[str, tuple[PhaseCost, ...]] = {}
    for name, costs in phases.items():
        kept = Growth() if name == "embedding_backward" else tower.kept
        kept = kept.plus(tower.held) if name == "forward" else kept
        around[name] = tuple(replace(c, saved=c.saved.plus(kept), inputs=c.inputs.plus(images)) for c in costs)
    label = "recompute" if setting.checkpointing else "activations"
    batch, width = inputs(arch, setting, ()).plus(images), arch.hidden * setting.base_bytes
    total, table = static.total.gradients, static.embedding_gradient
    waiting = table if arch.tied else 0
    held = sharing.part(total) if accumulating else 0
    around["forward"] += (PhaseCost(held, Growth(token=width), tower.forward, label, batch),)
    made = held + waiting if accumulating else sharing.part(total - static.tower.gradients - table + waiting)
    arrived = Growth(token=width * int(table > 0))
    backward = tuple(
        PhaseCost(
            made + (0 if accumulating else sharing.part(moment.gradients)),
            moment.kept.plus(arrived),
            moment.working,
            label,
            batch,
        )
        for moment in tower.backward
    )
    if backward:
        around["embedding_backward"] = (*around.get("embedding_backward", ()), *backward)
    return around


def _forward(arch: Architecture, setting: Setting, accumulating: bool, held: int) -> tuple[PhaseCost, ...]:
    """The last layer of each kind, behind all that those before it keep."""
    kinds, kept = kinds_of(arch, setting), _kept(arch, setting, accumulating)
    last = {kind: layer for layer, kind in enumerate(kinds)}
    label = "recompute" if setting.checkpointing else "activations"
    batch, embeddings = inputs(arch, setting, kinds), embeddings_held(arch, setting)
    casts = _casts(arch, setting, accumulating)
    return tuple(
        PhaseCost(
            held,
            kept[layer].plus(embeddings, int(layer > 0)).plus(casts[layer]),
            walk_layer(arch, setting, kind, accumulating).forward,
            label,
            batch,
        )
        for kind, layer in last.items()
    )


def embeddings_held(arch: Architecture, setting: Setting, *, learning: bool = True) -> Growth:
    """The model's frame holds what the embedding gave until all layers are done, saved by the first one or not."""
    follows = kinds_of(arch, setting)[0].follows
    saved = learning and (setting.checkpointing or (follows and setting.base_bytes == FLOAT))
    summed = arch.layout == "gpt2"  # positions are added: the sum goes in, and the frame holds both parts
    size = arch.hidden * setting.base_bytes
    if summed and setting.packed:
        return Growth(token=2 * size)
    return Growth(token=size * int(summed or not saved), position=size * int(summed))


def _backward(
    arch: Architecture, setting: Setting, accumulating: bool, early: int, sharing: Sharing
) -> dict[str, tuple[PhaseCost, ...]]:
    """The first and the last layer of each kind that backward comes to; in between sizes change evenly."""
    kinds = kinds_of(arch, setting)
    reached = [layer for layer in reversed(range(arch.layers)) if kinds[layer].learns]
    makes = {kind: sharing.part(layer_tensors(arch, setting, kind.chosen).gradients) for kind in set(kinds)}
    made, gradients = {}, early
    for layer in reached:
        made[layer] = gradients
        gradients += 0 if accumulating else makes[kinds[layer]]
    last = {kinds[layer]: layer for layer in reached}
    first = {kinds[layer]: layer for layer in reversed(reached)}

    def costs(layers: Iterable[int]) -> tuple[PhaseCost, ...]:
        return tuple(_backward_of(arch, setting, accumulating, layer, made[layer]) for layer in layers)

    if not reached:
        return {}
    return {"layer_first": costs(first.values()), "layer_last": costs(last.values())}


def _backward_of(arch: Architecture, setting: Setting, accumulating: bool, layer: int, gradients: int) -> PhaseCost:
    """One layer's backward pass, when so many bytes of gradients have been made."""
    kinds = kinds_of(arch, setting)
    batch = inputs(arch, setting, _recomputed(setting, kinds[: layer + 1]))
    working = walk_layer(arch, setting, kinds[layer], accumulating).backward
    label = "recompute" if setting.checkpointing else "activations"
    return PhaseCost(gradients, _kept(arch, setting, accumulating)[layer], working, label, batch)


def _recomputed(setting: Setting, kinds: Sequence[Kind]) -> list[Kind]:
    """Layers that will run again, for which their masks are kept."""
    return [kind for kind in kinds if setting.checkpointing and kind.learns]


@lru_cache(maxsize=256)
def _kept(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """What the layers below each layer keep for backward; the last entry is what all of them keep.

    Nothing where activations wait on the host. Within the layer at work all that it saves is counted all the same,
    which without checkpointing is more than there is.
    """
    kinds = kinds_of(arch, setting)
    if setting.activation_offload:
        return (Growth(),) * (len(kinds) + 1)
    return _summed(kinds, {kind: walk_layer(arch, setting, kind, accumulating).saved for kind in set(kinds)})


def _summed(kinds: Sequence[Kind], per_kind: Mapping[Kind, Growth]) -> tuple[Growth, ...]:
    """Nothing, then what the first layer adds, and so on to all of them."""
    sums = [Growth()]
    for kind in kinds:
        sums.append(sums[-1].plus(per_kind[kind]))
    return tuple(sums)


@lru_cache(maxsize=256)
def _casts(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """What autocast keeps of the layers below each layer, and of all of them."""
    kinds = kinds_of(arch, setting)
    if not setting.autocast:
        return (Growth(),) * (len(kinds) + 1)
    return _summed(kinds, {kind: walk_layer(arch, setting, kind, accumulating).casts for kind in set(kinds)})


class Peaks(NamedTuple):
    """Packed sizes of a walk through a layer, of which a first and a later micro-batch are read alike."""

    forward: set[int]
    saved: int
    backward: set[int]
    casts: int


@lru_cache(maxsize=256)
def walk_layer(arch: Architecture, setting: Setting, kind: Kind, accumulating: bool) -> Walked:
    """Forward and backward of one layer by itself. Where nothing learns, nothing is saved and there is no backward."""
    # A plan asks under several remedies, most of which a layer does not feel.
    felt = replace(_without_optimizer(setting), loss="plain", chunk_tokens=0)
    found = _layer_peaks(arch, felt, kind)
    return Walked(
        prune(growth(size, accumulating) for size in found.forward),
        growth(found.saved, accumulating),
        prune(growth(size, accumulating) for size in found.backward),
        growth(found.casts, accumulating),
    )


@lru_cache(maxsize=256)
def _layer_peaks(arch: Architecture, setting: Setting, kind: Kind) -> Peaks:
    walk = Walk(metered=setting.metered)
    layer = Layer(walk, arch, setting, kind)
    arguments = [entry(walk, arch, setting, kind.follows)]
    if setting.checkpointing:  # the checkpoint holds its input until the layer's backward is over
        output = walk.checkpoint(lambda: layer.forward(arguments[0]))
    else:
        output = layer.forward(arguments.pop())
    forward = walk.take_peaks()
    with_casts = walk.live
    walk.casts.clear()
    casts = with_casts - walk.live
    if output.node is None:
        return Peaks(forward, 0, set(), casts)
    saved, size, node = walk.live - output.size, output.size, output.node
    del output
    walk.backward(node, walk.allocate(size))
    return Peaks(forward, saved, walk.take_peaks(), casts)


def walk_head(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """Local maxima from the last layer's output to the loss and back to that output's gradient."""
    found = _head_peaks(arch, replace(_without_optimizer(setting), checkpointing=False))
    return prune(growth(size, accumulating) for size in found)


def _without_optimizer(setting: Setting) -> Setting:
    """The same to a walk, in which there is neither an optimizer nor a host."""
    return replace(setting, optimizer="adamw", momentum=False, optimizer_offload=False, activation_offload=False)


@lru_cache(maxsize=256)
def _head_peaks(arch: Architecture, setting: Setting) -> set[int]:
    walk = Walk(metered=setting.metered)
    arguments = [entry(walk, arch, setting, body_learns(arch, setting))]
    loss = Head(walk, arch, setting).forward(arguments.pop())
    walk.casts.clear()
    if loss.node is not None:  # else nothing learns at all, which the engine refuses by name once it has the model
        walk.backward(loss.node, walk.allocate(0))
    return walk.take_peaks()


def entry(walk: Walk, arch: Architecture, setting: Setting, gradient: bool) -> Ghost:
    """Hidden states, as a rule with a gradient to come."""
    hidden = walk.new(arch.hidden * TOKEN, setting.base_bytes)
    if gradient:
        hidden.node = Node([], lambda gradient: [], hidden.size, None)
    return hidden


def inputs(arch: Architecture, setting: Setting, kinds: Sequence[Kind]) -> Growth:
    """What a batch holds beside activations: ids and targets, positions and their rotary tables, and a mask for each
    way of attending among `kinds`. Rows share positions and masks unless each is packed differently, or eager."""
    masks = len({_mask_of(arch, setting, kind) for kind in kinds} - {None})
    if setting.attention == "eager":
        shared = Growth(token=INPUT_BYTES, square=masks * setting.base_bytes)
    elif setting.packed or sees_images_both_ways(arch, setting):
        shared = Growth(token=INPUT_BYTES, square=masks)
    else:
        shared = Growth(token=INPUT_BYTES, pair=masks)
    ids, tables = INDEX, _rotary_bytes(arch, setting)
    if setting.packed:
        return shared.plus(Growth(token=ids + tables))
    by_row = Growth(token=tables, position=ids) if arch.rotary_by_row else Growth(position=ids + tables)
    return shared.plus(by_row)


def _mask_of(arch: Architecture, setting: Setting, kind: Kind) -> bool | None:
    """Which mask a layer attends through: the full one (False), the window's (True), or none."""
    if setting.attention == "flash" or not (setting.attention == "eager" or kind.masked):
        return None
    return kind.slides


def _rotary_bytes(arch: Architecture, setting: Setting) -> int:
    """A position's rows of cos and sin, once for every kind of layer that has its own."""
    turned = int(arch.head_dim * arch.rotary_share)
    width = {"gpt2": 0, "gpt_oss": turned // 2}.get(arch.layout, turned)
    return 2 * width * setting.base_bytes * arch.rotary_tables
