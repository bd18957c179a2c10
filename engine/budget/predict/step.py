"""Combines the traces of single layers and of the model's end to the phases of one micro-batch.

Each phase is a list of live bytes above the static bytes, one entry per moment that may be the peak. While one layer
runs backward, the layers before it still have the tensors they saved, and the layers after it their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.budget.predict.layer_traces import head_step, layer_backward, layer_forward
from engine.budget.predict.parallel_layout import SINGLE_DEVICE, ParallelLayout, shards, static_of_a_rank
from engine.budget.predict.recompute import recomputing_stack
from engine.budget.predict.static import layer_tensors, static_bytes, token_row_tensors
from engine.budget.predict.vision import vision_cost
from engine.budget.trace.layer import LayerKind, layer_stack, sees_images_both_ways
from engine.budget.trace.memory_config import DTYPE_BYTES, MemoryConfig
from engine.budget.trace.operations import FLOAT, INDEX, mask_bytes
from engine.budget.trace.polynomial import (
    BYTE,
    NO_BYTES,
    PAIR,
    POSITION,
    SQUARE,
    TARGET,
    TOKEN,
    BytesPolynomial,
    Shape,
    highest,
    highest_value,
)
from engine.budget.trace.trainable import tables_with_rows


@dataclass(frozen=True)
class PhaseCost:
    """Live bytes of one phase above the static bytes: parts that are live throughout, plus the largest of `working`."""

    gradients: int
    saved: BytesPolynomial
    """Activations saved for backward."""
    working: tuple[BytesPolynomial, ...]
    """Bytes of all other tensors, at each moment that may be the peak."""
    label: str
    """The component that the working bytes belong to."""
    inputs: BytesPolynomial
    """The batch, its positions and masks."""
    buffers: int = 0
    """Gather and reduce buffers of several devices."""

    def sizes(self) -> list[BytesPolynomial]:
        """All live bytes of the phase above the static bytes, for each entry of `working`."""
        around = self.saved + self.inputs + (self.gradients + self.buffers) * BYTE
        return [around + working for working in self.working]

    def at(self, shape: Shape) -> int:
        around = self.gradients + self.buffers + self.saved.at(shape) + self.inputs.at(shape)
        return around + highest_value(self.working, shape)

    def components(self, shape: Shape) -> dict[str, int]:
        """The phase's peak bytes at a shape, by component; the scratch of attention's backward pass is part of
        `buffers`."""
        working = max(self.working, key=lambda size: size.at(shape), default=NO_BYTES)
        scratch = working.per_block_token * shape.blocks
        buffers = self.inputs.at(shape) + self.buffers + scratch
        parts = {"gradients": self.gradients, "activations": self.saved.at(shape), "buffers": buffers}
        parts[self.label] = parts.get(self.label, 0) + working.at(shape) - scratch
        return {name: size for name, size in parts.items() if size}


Phases = dict[str, tuple[PhaseCost, ...]]
"""For each phase name the moments that may be its peak."""


def costliest(costs: Sequence[PhaseCost], shape: Shape) -> PhaseCost:
    return max(costs, key=lambda cost: cost.at(shape))


ROTARY_PAIRS = {"gpt_oss": 2}
"""Layouts whose rotary tables have one value for this many dimensions of a head; one for each in all others."""

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
    """Predicts the phases of one micro-batch, without a vision encoder."""

    def __init__(self, arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout) -> None:
        self.stack = recomputing_stack(arch, config)
        self.even = not config.kept_layers  # which layers are recomputed matters to nothing else
        config = config if self.even else replace(config, kept_layers=0)
        self.arch, self.config, self.accumulating = arch, config, accumulating
        self.static, self.shards = static_bytes(arch, config), shards(arch, config, layout)
        # Sharded gradients accumulate only after reduction: each micro-batch allocates a layer's full gradients anew.
        self.adding = accumulating and self.shards is None
        self.ahead = {kind: layer_forward(arch, config, kind) for kind in self.stack.kinds}
        self.everything = static_of_a_rank(arch, config, layout).gradients
        self.held = self.everything if accumulating else 0
        # A tied table gets gradients from head and embedding; autograd keeps the head's until the embedding's exists.
        self.waiting = self.static.embedding_gradient if arch.tied else 0
        if arch.tied and tables_with_rows(arch, config):
            self.waiting += token_row_tensors(arch, config).gradients
        self.routers = router_statistics(arch, config)

    def _prefetched(self, layers: int) -> BytesPolynomial:
        """Bytes of the offloaded tensor, the largest that the first `layers` layers save, that is copied back while the
        one needed before it is used."""
        if not self.config.prefetches:
            return NO_BYTES
        kinds = self.stack.counts(0, layers)
        if any(not kind.recomputed for kind in kinds):
            kept = (trace.largest_offloaded for kind, trace in self.ahead.items() if not kind.recomputed)
            return next(iter(highest(kept)), NO_BYTES)
        return self.arch.hidden * self.config.base_bytes * TOKEN

    def phases(self) -> Phases:
        phases = {"forward": (*self._forward(), *self._reading()), "loss_backward": (self._head(),)} | self._backward()
        if self.static.embedding_gradient:
            phases["embedding_backward"] = (self._embedding(),)
        return phases

    def _forward(self) -> tuple[PhaseCost, ...]:
        """The costs of the last layer of each kind, when all layers before it have saved their tensors."""
        batch = inputs(self.arch, self.config, masks_of(self.config, self.stack.kinds))
        embeddings = embeddings_held(self.arch, self.config, self.stack.layers[0])
        return tuple(
            PhaseCost(
                self.held,
                self._kept(layer)
                + self._casts(layer)
                + self.routers.forward(layer)
                + (embeddings if layer else NO_BYTES),
                self.ahead[kind].forward,
                _label(kind.recomputed),
                batch,
                self.shards.micro_batch.forward[layer] if self.shards else 0,
            )
            for kind, (_, layer) in self.stack.spans.items()
        )

    def _reading(self) -> tuple[PhaseCost, ...]:
        """The moment after the last layer when router logits are read; empty if the model keeps none."""
        if not any(self.routers.logits):
            return ()
        layers, arch, config = self.arch.layers, self.arch, self.config
        output = (config.base_bytes + FLOAT) * arch.hidden * TOKEN  # of the last norm, and what it saves
        kept = self._kept(layers) + self._casts(layers) + self.routers.forward(layers)
        batch = inputs(arch, config, masks_of(config, self.stack.kinds))
        label = _label(self.stack.layers[-1].recomputed)
        return (PhaseCost(self.held, kept, (output + self.routers.reading(),), label, batch),)

    def _head(self) -> PhaseCost:
        """From the last layer's output to the loss and back to that output's gradient."""
        layers = self.arch.layers
        kept = self._kept(layers) + self._casts(layers) + self.routers.loss() + self._prefetched(layers)
        working = head_step(self.arch, self.config, self.adding)
        buffers = self.shards.micro_batch.loss if self.shards else 0
        return PhaseCost(self.held, kept, working, "loss", self._batch(layers), buffers)

    def _backward(self) -> Phases:
        """The costs of the layers whose backward pass may be the peak (`LayerStack.ends`). With sharded weights,
        also of those that follow in backward: the reduce buffer still has the gradients of the layer before."""
        ends = self.stack.ends(checkpointed=self.config.checkpointing and self.even)
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
        buffers = self.shards.micro_batch.backward[layer] if self.shards else 0
        kept = self._kept(layer) + self.routers.backward(layer) + (self._prefetched(layer) if layer else NO_BYTES)
        label = _label(self.stack.layers[layer].recomputed)
        return PhaseCost(gradients, kept, working, label, self._batch(layer + 1), buffers)

    def _made_after(self, layer: int) -> int:
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
        buffers = self.shards.micro_batch.embedding if self.shards else 0
        batch = inputs(arch, self.config, 0)
        return PhaseCost(before + self.waiting, NO_BYTES, tuple(working), "gradients", batch, buffers)

    def _kept(self, layer: int) -> BytesPolynomial:
        """Bytes on the device that all layers before `layer` have saved. Checkpoints may be offloaded to the host."""
        counts = self.stack.counts(0, layer).items()
        here = [(kind, count) for kind, count in counts if not (self.config.activation_offload and kind.recomputed)]
        return sum([count * self.ahead[kind].saved for kind, count in here], NO_BYTES)

    def _casts(self, layer: int) -> BytesPolynomial:
        """Bytes of the half-precision copies of weights before `layer`, which autocast caches until the loss."""
        counts = self.stack.counts(0, layer).items()
        return sum([count * self.ahead[kind].casts for kind, count in counts], NO_BYTES)

    def _batch(self, layers: int) -> BytesPolynomial:
        """Bytes of the batch, and of the masks that the first `layers` layers need when they are recomputed."""
        again = {kind for kind in self.stack.layers[:layers] if kind.recomputed and kind.learns}
        return inputs(self.arch, self.config, masks_of(self.config, again))


def _label(recomputed: bool) -> str:
    """The component that a layer's working bytes belong to."""
    return "recompute" if recomputed else "activations"


def _with_vision(
    phases: Phases, arch: Architecture, config: MemoryConfig, accumulating: bool, layout: ParallelLayout
) -> Phases:
    """The decoder's phases with the vision encoder's bytes and passes added: it runs forward before the decoder, and
    backward after it. If the embeddings are trained, the gradient of the decoder's input stays allocated meanwhile."""
    config = replace(config, kept_layers=0)
    static, encoder = static_bytes(arch, config), vision_cost(arch, config, accumulating)
    images = encoder.inputs + (INDEX if sees_images_both_ways(arch, config) else 3 * INDEX) * TOKEN
    around: Phases = {}
    for name, costs in phases.items():
        kept = NO_BYTES if name == "embedding_backward" else encoder.kept
        kept += encoder.held if name == "forward" else NO_BYTES
        around[name] = tuple(replace(c, saved=c.saved + kept, inputs=c.inputs + images) for c in costs)
    label = _label(config.checkpointing)
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


def embeddings_held(arch: Architecture, config: MemoryConfig, first: LayerKind | None) -> BytesPolynomial:
    """Bytes of the embedding's output, to which a local variable of the model's forward refers until all layers are
    done. Zero if the layer `first` saves it for backward, where it is already counted; None without gradients."""
    saved = first is not None and first.learns and (first.recomputed or (first.follows and config.base_bytes == FLOAT))
    summed = arch.positions is not None  # layers get the sum with positions; local variables refer to both summands
    size = arch.hidden * config.base_bytes
    if summed and config.packed:
        return 2 * size * TOKEN
    return size * (int(summed or not saved) * TOKEN + int(summed) * POSITION)


def masks_of(config: MemoryConfig, kinds: Iterable[LayerKind]) -> int:
    return len({_mask_of(config, kind) for kind in kinds} - {None})


@lru_cache(maxsize=256)
def inputs(arch: Architecture, config: MemoryConfig, masks: int) -> BytesPolynomial:
    """Bytes of a batch: ids, labels and targets, position ids, rotary tables, and `masks` attention masks. Rows
    share positions and masks, but packed rows have their own, and so have rows in eager attention their masks."""
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
    if arch.positions is not None:
        return 0
    width = int(arch.head_dim * arch.rotary_share) // ROTARY_PAIRS.get(arch.layout, 1)
    return 2 * width * config.base_bytes * arch.rotary_tables


ROUTER_WEIGHTS = frozenset({"mlp.gate.weight", "mlp.router.weight"})
"""Names of router weights, below a layer."""


@dataclass(frozen=True)
class RouterStatistics:
    """Bytes that a training step of a mixture keeps of its routers, to count how often each expert is chosen and to
    compute the auxiliary loss.

    The logits of every layer are kept until all layers are done. Then each layer's become fp32 probabilities, which
    only the auxiliary loss saves for backward: 2 + 4 bytes per token, expert and layer in bf16. Before any layer runs
    backward, the probabilities become gradients of the logits.
    """

    logits: tuple[int, ...]
    """Per token of each layer; 0 without experts, or if the logits are not read."""
    probabilities: tuple[int, ...]
    """Likewise, in fp32."""
    balances: bool
    """Whether the auxiliary loss is computed."""

    def forward(self, layer: int) -> BytesPolynomial:
        return sum(self.logits[:layer]) * TOKEN

    def reading(self) -> BytesPolynomial:
        """Bytes in addition to the logits while counts and auxiliary loss are computed from them."""
        largest = max(self.probabilities)
        return (sum(self.probabilities) + largest if self.balances else 2 * largest) * TOKEN

    def loss(self) -> BytesPolynomial:
        return (sum(self.probabilities) if self.balances else 0) * TOKEN

    def backward(self, layer: int) -> BytesPolynomial:
        """The logits' gradients of this layer and of the layers before it."""
        return (sum(self.logits[: layer + 1]) if self.balances else 0) * TOKEN


@lru_cache(maxsize=256)
def router_statistics(arch: Architecture, config: MemoryConfig) -> RouterStatistics:
    kinds = [kind.trainable for kind in layer_stack(arch, config).layers]
    learns = any(not ROUTER_WEIGHTS.isdisjoint(kind.trained) for kind in kinds)
    balances = learns if config.balances_experts is None else config.balances_experts
    read = [arch.experts is not None and not kind.dense and (balances or config.watches_experts) for kind in kinds]
    count = arch.experts.count if arch.experts is not None else 0
    width = DTYPE_BYTES["float16"] if config.autocast else config.base_bytes
    return RouterStatistics(
        tuple([count * width * each for each in read]), tuple([count * FLOAT * each for each in read]), balances
    )
