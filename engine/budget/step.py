"""One micro-batch, phase by phase: a walk through one layer and one through the head, put together for all layers.

Every phase is a set of candidate live sizes above the static bytes; its peak at a shape is the largest of them there.
Between phases only arithmetic is needed: while a layer is differentiated, those before it hold what they saved and
those after it hold their gradients.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial

from engine.budget.architecture import Architecture
from engine.budget.growth import PhaseCost
from engine.budget.kinds import Kind, Stack, sees_images_both_ways, stack_of
from engine.budget.operations import FLOAT, INDEX
from engine.budget.packed import PAIR, POSITION, SQUARE, TOKEN
from engine.budget.selection import Selection
from engine.budget.setting import Setting
from engine.budget.sharing import ALONE, Sharing, shards, static_of_a_rank
from engine.budget.static import layer_tensors, static_bytes
from engine.budget.vision import tower_cost
from engine.budget.walks import Ahead, leading_behind, walk_backward, walk_forward, walk_head, walked_alike

INPUT_BYTES = 24
"""Per token: input ids, labels and the targets among them, int64."""

Phases = dict[str, tuple[PhaseCost, ...]]
"""By name, each as alternatives of which the largest counts."""


@lru_cache(maxsize=256)
def step_cost(arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing = ALONE) -> Phases:
    """Phases of one micro-batch; `accumulating` when an earlier one of the same step has left gradients."""
    phases = _Step(arch, setting, accumulating, sharing).phases()
    if setting.image_patches:
        phases = _with_tower(phases, arch, setting, accumulating, sharing)
    return phases


class _Step:
    """What the phases of a micro-batch have in common. Images come on top."""

    def __init__(self, arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing) -> None:
        self.arch, self.setting, self.accumulating, self.sharing = arch, setting, accumulating, sharing
        self.static, self.spread = static_bytes(arch, setting), shards(arch, setting, sharing)
        # Where weights are spread, what is added up are parts: a layer's gradients are made anew in every micro-batch.
        self.adding = accumulating and self.spread is None
        self.stack = stack_of(arch, setting)
        self.bounds, self.ahead = _bounds(arch, setting), _ahead(arch, setting)
        self.sizes = _each_saves(self.ahead)
        self.behind = {kind: self._behind(kind) for kind in self.stack.kinds if kind.learns and kind not in self.bounds}
        self.everything = static_of_a_rank(arch, setting, sharing).gradients
        self.held = self.everything if accumulating else 0
        table = self.static.embedding_gradient
        # A tied table gets its gradient from both ends; autograd keeps the head's until the embedding's has come.
        self.waiting = table if arch.tied else 0
        below = zip(self.stack.kinds, self.stack.spans, strict=True)
        masks = [(first, kind.learns, _mask_of(setting, kind)) for kind, (first, _) in below]
        self.masks = [each for each in masks if each[-1] is not None]
        """For each kind with one: its first layer, whether it learns, and the mask."""
        self.label = "recompute" if setting.checkpointing else "activations"

    def phases(self) -> Phases:
        """All but `optimizer_step`, which depends on nothing here."""
        phases = {"forward": self._forward(), "loss_backward": (self._head(),)} | self._backward()
        if self.static.embedding_gradient:
            phases["embedding_backward"] = (self._embedding(),)
        return phases

    def _forward(self) -> tuple[PhaseCost, ...]:
        """The last layer of each kind, behind all that those before it keep."""
        batch = self._inputs(len({mask for _, _, mask in self.masks}))
        embeddings = embeddings_held(self.arch, self.setting)
        return tuple(
            [
                PhaseCost(
                    self.held,
                    self._around(layer) + (embeddings if layer else 0),
                    ahead.forward,
                    self.label,
                    batch,
                    self.spread.forward(layer) if self.spread else 0,
                    partial(self._ahead_of, kind) if kind in self.bounds else None,
                )
                for kind, ahead, (_, layer) in zip(self.stack.kinds, self.ahead, self.stack.spans, strict=True)
            ]
        )

    def _ahead_of(self, kind: Kind) -> tuple[int, ...]:
        """Maxima of its forward pass."""
        return walk_forward(self.arch, self.setting, kind).forward

    def _head(self) -> PhaseCost:
        """From the last layer to the loss and back."""
        through = self._around(self.arch.layers)
        working = walk_head(self.arch, self.setting, self.adding)
        buffers = self.spread.loss() if self.spread else 0
        return PhaseCost(self.held, through, working, "loss", self._batch(self.arch.layers), buffers)

    def _backward(self) -> Phases:
        """The first layers that backward comes to, and the last; in shards also the one after each of the first, which
        is the first that finds gradients on their way out."""
        ends = self.stack.ends(checkpointed=self.setting.checkpointing)
        if self.spread:
            after = {layer - 1: name for layer, name in ends.items() if name == "layer_first" and layer}
            ends = {layer: name for layer, name in after.items() if self.stack.kind(layer).learns} | ends
        phases: Phases = {}
        for layer, name in ends.items():
            phases[name] = (*phases.get(name, ()), self._backward_of(self.stack.kind(layer), layer))
        return phases

    def _backward_of(self, kind: Kind, layer: int) -> PhaseCost:
        """One layer's backward pass, when those after it and the head have made their gradients."""
        gradients = self.held + self.waiting
        if not self.accumulating:
            gradients += self._made_after(layer)
        working = self.behind[self.bounds.get(kind, kind)]
        closer = partial(self._behind, kind) if kind in self.bounds else None
        buffers = self.spread.backward(layer) if self.spread else 0
        batch = self._batch(layer + 1)
        return PhaseCost(gradients, self._kept(layer), working, self.label, batch, buffers, closer)

    def _made_after(self, layer: int) -> int:
        """Gradients of the head and of the layers that come to their backward before this one."""
        if self.spread:
            head = self.spread.head.held.gradients if self.spread.head else 0
            return head + sum(group.held.gradients for group in self.spread.layers[layer + 1 :])
        above = self.stack.between(layer + 1, self.arch.layers)
        return self.static.head_gradient + sum(count * self._made(kind.chosen) for kind, count in above)

    def _made(self, chosen: Selection) -> int:
        """Bytes of a layer's gradients."""
        return layer_tensors(self.arch, self.setting, chosen).gradients

    def _behind(self, kind: Kind) -> tuple[int, ...]:
        """Maxima of its backward pass."""
        return walk_backward(self.arch, self.setting, kind, self.adding)

    def _embedding(self) -> PhaseCost:
        """Tied: the head's gradient, the embedding's, and their sum are live at once."""
        arch, table = self.arch, self.static.embedding_gradient
        before = self.everything - (self.spread.table.held.gradients if self.spread else table)
        if self.accumulating:
            before = self.held
        working = (2 if arch.tied else 1) * table + arch.hidden * self.setting.base_bytes * TOKEN
        buffers = self.spread.embedding() if self.spread else 0
        return PhaseCost(before + self.waiting, 0, (working,), "gradients", self._inputs(0), buffers)

    def _kept(self, layer: int) -> int:
        """What the layers below one keep for backward.

        Of checkpoints nothing where activations wait on the host.
        """
        if self.setting.activation_offload and self.setting.checkpointing:
            return 0
        return _saved(self.sizes, self.stack, layer)

    def _around(self, layer: int) -> int:
        """The same, and what autocast keeps of them until the loss."""
        kept = self._kept(layer)
        if not self.setting.autocast:
            return kept
        return kept + sum([ahead.casts * n for ahead, n in zip(self.ahead, self.stack.counts(layer), strict=True)])

    def _batch(self, layers: int) -> int:
        """The batch, and masks for as many layers as will run again."""
        if not (self.setting.checkpointing and self.masks):
            return self._inputs(0)
        return self._inputs(len({mask for first, learns, mask in self.masks if learns and first < layers}))

    def _inputs(self, masks: int) -> int:
        return inputs(self.arch, self.setting, masks)


@lru_cache(maxsize=256)
def _bounds(arch: Architecture, setting: Setting) -> dict[Kind, Kind]:
    """Some kinds of layers never decide, as a rule: the first beside adapters, those without a mask. What they keep
    under checkpoints is known, and for the rest a kind that holds more is a bound, which spares a walk."""
    stack = stack_of(arch, setting)
    if len(stack.kinds) == 1 or not setting.checkpointing:
        return {}
    return {
        kind: other
        for kind, other in stack.larger.items()
        if other and kind.learns and not walked_alike(setting, kind, other)
    }


@lru_cache(maxsize=256)
def _ahead(arch: Architecture, setting: Setting) -> tuple[Ahead, ...]:
    """The forward pass of each kind of layer, in their order."""
    stack, bounds = stack_of(arch, setting), _bounds(arch, setting)
    return tuple([walk_forward(arch, setting, bounds.get(kind, kind)) for kind in stack.kinds])


def _each_saves(ahead: tuple[Ahead, ...]) -> list[int]:
    """What layers of each kind save, packed; once where all save the same."""
    sizes = [one.saved for one in ahead]
    return sizes[:1] if sizes.count(sizes[0]) == len(sizes) else sizes


def _saved(sizes: list[int], stack: Stack, layer: int) -> int:
    """What the layers below one save, packed."""
    if len(sizes) == 1:
        return sizes[0] * layer
    return sum([size * count for size, count in zip(sizes, stack.counts(layer), strict=True)])


@lru_cache(maxsize=256)
def least_at_once(arch: Architecture, setting: Setting, *, spread: bool) -> tuple[int, ...]:
    """Live sets that no whole batch gets by without, above the static bytes and packed, for hardly any work beside the
    walks: the last layer's backward pass at its height, behind what the others keep; and the first one's, beside the
    gradients of all others, where weights are not `spread`. Nothing where the last one's is not known."""
    stack, sizes = stack_of(arch, setting), _each_saves(_ahead(arch, setting))
    last = stack.kind(-1)
    if not last.learns or last in _bounds(arch, setting):
        return ()
    working = leading_behind(arch, setting, last)
    found = working if setting.activation_offload else working + _saved(sizes, stack, arch.layers - 1)
    if spread or len(stack.kinds) > 1:  # another kind may be the first
        return (found,)
    static = static_bytes(arch, setting)
    made = static.head_gradient + static.layers.gradients - layer_tensors(arch, setting, last.chosen).gradients
    return found, made + working


def _with_tower(
    phases: Phases, arch: Architecture, setting: Setting, accumulating: bool, sharing: Sharing
) -> Phases:
    """The same with images: the tower goes first, its output and what it keeps are held meanwhile, and its backward
    pass comes when gradients have reached the decoder's input, where they wait if the embeddings learn, too."""
    static, tower = static_bytes(arch, setting), tower_cost(arch, setting, accumulating)
    images = tower.inputs + (INDEX if sees_images_both_ways(arch, setting) else 3 * INDEX) * TOKEN
    around: Phases = {}
    for name, costs in phases.items():
        kept = 0 if name == "embedding_backward" else tower.kept
        kept += tower.held if name == "forward" else 0
        around[name] = tuple(replace(c, saved=c.saved + kept, inputs=c.inputs + images) for c in costs)
    label = "recompute" if setting.checkpointing else "activations"
    batch, width = inputs(arch, setting, 0) + images, arch.hidden * setting.base_bytes * TOKEN
    total, table = static.total.gradients, static.embedding_gradient
    waiting = table if arch.tied else 0
    held = sharing.part(total) if accumulating else 0
    around["forward"] += (PhaseCost(held, width, tower.forward, label, batch),)
    made = held + waiting if accumulating else sharing.part(total - static.tower.gradients - table + waiting)
    arrived = width * int(table > 0)
    backward = tuple(
        PhaseCost(
            made + (0 if accumulating else sharing.part(moment.gradients)),
            moment.kept + arrived,
            moment.working,
            label,
            batch,
        )
        for moment in tower.backward
    )
    if backward:
        around["embedding_backward"] = (*around.get("embedding_backward", ()), *backward)
    return around


def embeddings_held(arch: Architecture, setting: Setting, *, learning: bool = True) -> int:
    """The model's frame holds what the embedding gave until all layers are done, saved by the first one or not."""
    follows = stack_of(arch, setting).kind(0).follows
    saved = learning and (setting.checkpointing or (follows and setting.base_bytes == FLOAT))
    summed = arch.layout == "gpt2"  # positions are added: the sum goes in, and the frame holds both parts
    size = arch.hidden * setting.base_bytes
    if summed and setting.packed:
        return 2 * size * TOKEN
    return size * (int(summed or not saved) * TOKEN + int(summed) * POSITION)


def masks_of(setting: Setting, kinds: Iterable[Kind]) -> int:
    """How many masks there are: one for each way of attending."""
    return len({_mask_of(setting, kind) for kind in kinds} - {None})


@lru_cache(maxsize=256)
def inputs(arch: Architecture, setting: Setting, masks: int) -> int:
    """What a batch holds beside activations: ids and targets, positions and their rotary tables, and so many masks.

    Rows share positions and masks unless each is packed differently, or eager.
    """
    shared = INPUT_BYTES * TOKEN
    if setting.attention == "eager":
        shared += masks * setting.base_bytes * SQUARE
    else:
        shared += masks * (SQUARE if setting.packed or sees_images_both_ways(arch, setting) else PAIR)
    tables = _rotary_bytes(arch, setting)
    if setting.packed:
        return shared + (INDEX + tables) * TOKEN
    return shared + INDEX * POSITION + tables * (TOKEN if arch.rotary_by_row else POSITION)


def _mask_of(setting: Setting, kind: Kind) -> bool | None:
    """Which mask a layer attends through: the full one (False), the window's (True), or none."""
    if setting.attention == "flash" or not (setting.attention == "eager" or kind.masked):
        return None
    return kind.slides


def _rotary_bytes(arch: Architecture, setting: Setting) -> int:
    """A position's rows of cos and sin, once for every kind of layer that has its own."""
    turned = int(arch.head_dim * arch.rotary_share)
    width = {"gpt2": 0, "gpt_oss": turned // 2}.get(arch.layout, turned)
    return 2 * width * setting.base_bytes * arch.rotary_tables
