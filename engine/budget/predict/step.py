"""Combines the traces of single layers and of the model's end to the phases of one micro-batch.

Each phase is a list of live bytes above the static bytes, one entry per moment that may be the peak; the largest at a
shape is the phase's peak. While one layer runs backward, the layers before it still have the tensors they saved, and
the layers after it have their gradients.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.predict.layer_traces import head_step, layer_backward, layer_forward
from engine.budget.predict.parallel_layout import SINGLE_DEVICE, ParallelLayout, shards, static_of_a_rank
from engine.budget.predict.phase import PhaseCost, Phases
from engine.budget.predict.router_statistics import router_statistics
from engine.budget.predict.static import layer_tensors, static_bytes
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.dropout import mask_bytes
from engine.budget.trace.layer_kinds import LayerKind, layer_stack, sees_images_both_ways
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT, INDEX
from engine.budget.trace.polynomial import (
    BYTE,
    NO_BYTES,
    PAIR,
    POSITION,
    SQUARE,
    TARGET,
    TOKEN,
    BytesPolynomial,
    highest,
)

INPUT_BYTES = 16 * TOKEN + 8 * TARGET
"""Input ids and labels of all tokens, and the ids of the tokens that count in the loss; int64 each."""


@lru_cache(maxsize=256)
def step_cost(
    arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout = SINGLE_DEVICE
) -> Phases:
    """The costs of one micro-batch by phase; `accumulating`: gradients of an earlier micro-batch of the same step
    exist."""
    phases = _Step(arch, config, accumulating, layout).phases()
    if config.image_patches:
        phases = _with_vision(phases, arch, config, accumulating, layout)
    return phases


class _Step:
    """Predicts the bytes of each phase of one micro-batch, from forward to backward, without those of a vision
    encoder."""

    def __init__(self, arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout) -> None:
        self.arch, self.config, self.accumulating = arch, config, accumulating
        self.static, self.shards = static_bytes(arch, config), shards(arch, config, layout)
        # Sharded gradients accumulate only after reduction: each micro-batch allocates a layer's full gradients anew.
        self.adding = accumulating and self.shards is None
        self.stack = layer_stack(arch, config)
        self.ahead = {kind: layer_forward(arch, config, kind) for kind in self.stack.kinds}
        self.everything = static_of_a_rank(arch, config, layout).gradients
        self.held = self.everything if accumulating else 0
        # A tied table gets gradients from head and embedding; autograd keeps the head's until the embedding's exists.
        self.waiting = self.static.embedding_gradient if arch.tied else 0
        self.prefetched = self._prefetched()
        self.routers = router_statistics(arch, config)
        self.label = "recompute" if config.checkpointing else "activations"

    def _prefetched(self) -> BytesPolynomial:
        """Bytes of the offloaded tensor that is copied back to the device while the one needed before it is used; 0 if
        the device does not prefetch."""
        if not self.config.prefetches:
            return NO_BYTES
        if self.config.checkpointing:
            return self.arch.hidden * self.config.base_bytes * TOKEN
        return next(iter(highest(trace.largest_offloaded for trace in self.ahead.values())), NO_BYTES)

    def phases(self) -> Phases:
        """The costs of all phases of the micro-batch, by phase, from forward to the embedding's backward pass."""
        phases = {"forward": (*self._forward(), *self._reading()), "loss_backward": (self._head(),)} | self._backward()
        if self.static.embedding_gradient:
            phases["embedding_backward"] = (self._embedding(),)
        return phases

    def _forward(self) -> tuple[PhaseCost, ...]:
        """The costs of forward: one for the last layer of each kind, when all layers before it have saved their
        tensors."""
        batch = inputs(self.arch, self.config, masks_of(self.config, self.stack.kinds))
        embeddings = embeddings_held(self.arch, self.config)
        return tuple(
            PhaseCost(
                self.held,
                self._kept(layer) + self._casts(layer) + self.routers.forward(layer)
                + (embeddings if layer else NO_BYTES),
                self.ahead[kind].forward,
                self.label,
                batch,
                self.shards.forward(layer) if self.shards else 0,
            )
            for kind, (_, layer) in self.stack.spans.items()
        )

    def _reading(self) -> tuple[PhaseCost, ...]:
        """The cost of the moment after the last layer when router logits are read; empty if the model keeps none."""
        if not any(self.routers.logits):
            return ()
        layers, arch, config = self.arch.layers, self.arch, self.config
        output = (config.base_bytes + FLOAT) * arch.hidden * TOKEN  # of the last norm, and what it saves
        kept = self._kept(layers) + self._casts(layers) + self.routers.forward(layers)
        batch = inputs(arch, config, masks_of(config, self.stack.kinds))
        return (PhaseCost(self.held, kept, (output + self.routers.reading(),), self.label, batch),)

    def _head(self) -> PhaseCost:
        """The cost of the phase from the last layer's output to the loss and back to that output's gradient."""
        layers = self.arch.layers
        kept = self._kept(layers) + self._casts(layers) + self.routers.loss() + self.prefetched
        working = head_step(self.arch, self.config, self.adding)
        buffers = self.shards.loss() if self.shards else 0
        return PhaseCost(self.held, kept, working, "loss", self._batch(layers), buffers)

    def _backward(self) -> Phases:
        """The costs of the layers whose backward pass may be the peak (`LayerStack.ends`), by phase.

        With sharded weights, the layers that run backward right after them are included, because the reduce buffer then
        still has the gradients of the layer before.
        """
        ends = self.stack.ends(checkpointed=self.config.checkpointing)
        if self.shards:
            after = {layer - 1: name for layer, name in ends.items() if name == "layer_first" and layer}
            ends = {layer: name for layer, name in after.items() if self.stack.layers[layer].learns} | ends
        phases: Phases = {}
        for layer, name in ends.items():
            phases[name] = (*phases.get(name, ()), self._backward_of(layer))
        return phases

    def _backward_of(self, layer: int) -> PhaseCost:
        """The cost of one layer's backward pass, when the head and all layers after it have their gradients."""
        gradients = self.held + self.waiting
        if not self.accumulating:
            gradients += self._made_after(layer)
        working = layer_backward(self.arch, self.config, self.stack.layers[layer], self.adding)
        buffers = self.shards.backward(layer) if self.shards else 0
        kept = self._kept(layer) + self.routers.backward(layer) + (self.prefetched if layer else NO_BYTES)
        return PhaseCost(gradients, kept, working, self.label, self._batch(layer + 1), buffers)

    def _made_after(self, layer: int) -> int:
        """Bytes of the gradients of the head and of all layers after `layer`."""
        if self.shards:
            head = self.shards.head.held.gradients if self.shards.head else 0
            return head + sum(group.held.gradients for group in self.shards.layers[layer + 1 :])
        above = self.stack.counts(layer + 1, self.arch.layers).items()
        made = [count * layer_tensors(self.arch, self.config, kind.trainable).gradients for kind, count in above]
        return self.static.head_gradient + sum(made)

    def _embedding(self) -> PhaseCost:
        """The cost of the embedding's backward pass. If head and embedding are tied, the head's gradient, the
        embedding's and their sum coexist."""
        arch, table = self.arch, self.static.embedding_gradient
        before = self.everything - (self.shards.table.held.gradients if self.shards else table)
        if self.accumulating:
            before = self.held
        gradient = arch.hidden * self.config.base_bytes * TOKEN
        working = [(2 if arch.tied else 1) * table * BYTE + gradient]
        if self.config.embedding_dropout:
            working.append(2 * gradient + mask_bytes(self.config) * arch.hidden * POSITION)
        buffers = self.shards.embedding() if self.shards else 0
        batch = inputs(arch, self.config, 0)
        return PhaseCost(before + self.waiting, NO_BYTES, tuple(working), "gradients", batch, buffers)

    def _kept(self, layer: int) -> BytesPolynomial:
        """Bytes that all layers before `layer` have saved for backward; 0 if checkpoints are offloaded to the host."""
        if self.config.activation_offload and self.config.checkpointing:
            return NO_BYTES
        counts = self.stack.counts(0, layer).items()
        return sum([count * self.ahead[kind].saved for kind, count in counts], NO_BYTES)

    def _casts(self, layer: int) -> BytesPolynomial:
        """Bytes of the half-precision copies of weights in all layers before `layer`; autocast caches them until the
        loss."""
        counts = self.stack.counts(0, layer).items()
        return sum([count * self.ahead[kind].casts for kind, count in counts], NO_BYTES)

    def _batch(self, layers: int) -> BytesPolynomial:
        """Bytes of the batch, and of the masks that the first `layers` layers need when backward recomputes them."""
        again = self.stack.layers[:layers] if self.config.checkpointing else ()
        return inputs(self.arch, self.config, masks_of(self.config, {kind for kind in again if kind.learns}))


def _with_vision(
    phases: Phases, arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout
) -> Phases:
    """The decoder's phases with the vision encoder's bytes and passes added.

    The encoder runs forward before the decoder and backward after it. During the decoder's phases, the encoder's output
    and the tensors that it saved stay allocated. If the embeddings are trained, the gradient of the decoder's input
    stays allocated during the encoder's backward pass.
    """
    static, encoder = static_bytes(arch, config), vision_cost(arch, config, accumulating)
    images = encoder.inputs + (INDEX if sees_images_both_ways(arch, config) else 3 * INDEX) * TOKEN
    around: Phases = {}
    for name, costs in phases.items():
        kept = NO_BYTES if name == "embedding_backward" else encoder.kept
        kept += encoder.held if name == "forward" else NO_BYTES
        around[name] = tuple(replace(c, saved=c.saved + kept, inputs=c.inputs + images) for c in costs)
    label = "recompute" if config.checkpointing else "activations"
    batch, width = inputs(arch, config, 0) + images, arch.hidden * config.base_bytes * TOKEN
    total, table = static.total.gradients, static.embedding_gradient
    waiting = table if arch.tied else 0
    held = layout.part(total) if accumulating else 0
    around["forward"] += (PhaseCost(held, width, encoder.forward, label, batch),)
    made = held + waiting if accumulating else layout.part(total - static.vision.gradients - table + waiting)
    arrived = width * int(table > 0)
    backward = tuple(
        PhaseCost(
            made + (0 if accumulating else layout.part(moment.gradients)),
            moment.kept + arrived,
            moment.working,
            label,
            batch,
        )
        for moment in encoder.backward
    )
    if backward:
        around["embedding_backward"] = (*around.get("embedding_backward", ()), *backward)
    return around


def embeddings_held(arch: Architecture, config: MemoryConfig, *, learning: bool = True) -> BytesPolynomial:
    """Bytes of the embedding's output, which stays allocated until all layers are done, because a local variable of the
    model's forward refers to it.

    Zero if the first layer saves it for backward, where it is already counted. Without `learning`, no layer saves
    anything.
    """
    follows = layer_stack(arch, config).layers[0].follows
    saved = learning and (config.checkpointing or (follows and config.base_bytes == FLOAT))
    summed = arch.layout == "gpt2"  # layers get the sum with positions; local variables refer to both summands
    size = arch.hidden * config.base_bytes
    if summed and config.packed:
        return 2 * size * TOKEN
    return size * (int(summed or not saved) * TOKEN + int(summed) * POSITION)


def masks_of(config: MemoryConfig, kinds: Iterable[LayerKind]) -> int:
    """How many different attention masks these kinds of layers need."""
    return len({_mask_of(config, kind) for kind in kinds} - {None})


@lru_cache(maxsize=256)
def inputs(arch: Architecture, config: MemoryConfig, masks: int) -> BytesPolynomial:
    """Bytes of a batch: ids, labels and targets, position ids, rotary tables, and `masks` attention masks.

    All rows share one set of positions and masks, except that packed rows have their own, and rows in eager attention
    have their own masks.
    """
    shared = INPUT_BYTES
    if config.attention == "eager":
        shared += masks * config.base_bytes * SQUARE
    else:
        shared += masks * (SQUARE if config.packed or sees_images_both_ways(arch, config) else PAIR)
    tables = _rotary_bytes(arch, config)
    if config.packed:
        return shared + (INDEX + tables) * TOKEN
    return shared + INDEX * POSITION + tables * (TOKEN if arch.rotary_by_row else POSITION)


def _mask_of(config: MemoryConfig, kind: LayerKind) -> bool | None:
    """The mask that a layer uses: the full one (False), the sliding window's (True), or no mask (None)."""
    if config.attention == "flash" or not (config.attention == "eager" or kind.masked):
        return None
    return kind.slides


def _rotary_bytes(arch: Architecture, config: MemoryConfig) -> int:
    """Bytes per position of all rotary tables (cos and sin); some families have a pair for each kind of layer."""
    turned = int(arch.head_dim * arch.rotary_share)
    width = {"gpt2": 0, "gpt_oss": turned // 2}.get(arch.layout, turned)
    return 2 * width * config.base_bytes * arch.rotary_tables
