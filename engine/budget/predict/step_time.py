"""Predicts how long an optimizer step takes on one device, for ranking settings: products by the device's arithmetic,
everything else by the bytes that move, launches, and what is recomputed or copied to the host.

A roofline: the products of a layer take as long as the slower of their arithmetic and reading its weights. What lies
between products (norms, activations, adapters in fp32) moves a multiple of the bytes that a layer saves for backward,
which the memory trace knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.parameters import elements, layer_parameters
from engine.budget.predict.layer_traces import layer_forward
from engine.budget.predict.non_torch_memory import state_on_host
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.products import Flops, adapter_weights, layer_flops, trained_weights, used_weights
from engine.budget.predict.recompute import recompute_order
from engine.budget.predict.static import static_bytes
from engine.budget.trace.layer import LayerKind, layer_stack
from engine.budget.trace.memory_config import MemoryConfig, may_take_cudnn
from engine.budget.trace.polynomial import BytesPolynomial, Shape, shape_of
from engine.config.attention import HOPPER
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile

PRODUCT_SHARE = 0.67
"""Share of the datasheet's FLOP/s that a layer's products reach (the largest reach 0.8: an H200, 770 to 800 of 989
TFLOP/s at 8192³)."""
FLASH_SHARE, FLASH_SHARE_ON_HOPPER, CUDNN_SHARE = 1.2, 0.53, 0.79
"""FLOP/s of attention, forward and backward, as a share of the datasheet's, where pairs that a causal mask hides count
although they are left out: torch's flash kernel on the Ampere cards it was written for (190 of 312 TFLOP/s without the
hidden pairs: Dao, FlashAttention-2, 2023, figure 4), on an H100, and cuDNN's kernel there (3.7 and 2.5 ms for 2 x 4096
tokens of an 8B layer, by steps of 1,158 and 1,080 ms)."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass as a multiple of those of forward: five products for two."""
FP32_SHARE = 1 / 15
"""FLOP/s of fp32 products, as a share of those in bf16 (an H100: 67 of 989 TFLOP/s)."""
FORWARD_PASSES, BACKWARD_PASSES = 5, 9
"""How often as many bytes as a layer saves pass through memory between its products: values are written and read
several times before one of them is saved (norms, rotary embedding, activation and adapters, each as one kernel after
the other). An 8B model on an H100: 715 ms a micro-batch with nothing recomputed and 998 ms with everything."""
FUSED_FORWARD_PASSES, FUSED_BACKWARD_PASSES = 2, 4
"""The same with fused kernels, which read and write each value once: 579 and 818 ms."""
LAUNCHES_PER_LAYER, LAUNCHES_PER_ADAPTER = 28, 3
"""Kernels of a layer's forward pass, and of each adapter in it; backward has twice as many (6,300 in a micro-batch of a
recomputing 8B model with adapters on all seven linear layers)."""
LAUNCHES_PER_PIECE = 7
"""Kernels of a feed-forward block: three products, activation, product of both, and the copies of input and output."""
LAUNCH_SECONDS = 14e-6
"""Of the host for one kernel of a GPU, while the device works on others (90 ms for 6,300)."""
MICRO_BATCH_SECONDS = 2e-3
CPU_TFLOPS, CPU_GBS, CPU_LAUNCH_SECONDS, CPU_MICRO_BATCH_SECONDS = 0.054, 52.0, 78e-6, 5e-3
"""Of one core with fp32, where the profile does not tell, fitted to small models (`python -m benchmarks.checkpointing
times`), whose activations partly stay in caches. Launches do not overlap with the work."""
HOST_LINK_GBS, HOST_LINK_GBS_ON_HOPPER = 25.0, 38.0
"""Between device and host, each way: PCIe 4 with 16 lanes, and what an H100 reached with PCIe 5 (73 GB of an 8B LoRA's
activations in 1.9 s)."""
CPU_COPY_GBS = 3.0
"""Of offloaded tensors, each way, on one core (the demo: 236 ms a step, with activations offloaded 279)."""
UPDATE_PASSES = 4
"""How often the optimizer's step moves a trained weight, its gradient and its state."""


class Speed(NamedTuple):
    """What a device does in a second."""

    flops: float
    bytes: float
    launch_seconds: float
    overlaps: bool
    """Kernels are launched while the device works."""
    micro_batch_seconds: float
    """What one more micro-batch costs beside its work: its batch is made, its results are read."""
    stated: bool
    """Arithmetic and bandwidth are the profile's, not typical values."""
    link_bytes: float
    """Between device and host, each way."""
    attention_flops: float | None = None
    """FLOP/s of a fused attention kernel; None: attention is products like those of a layer."""


def speed_of(profile: Profile, config: MemoryConfig, recipe: Recipe) -> Speed:
    device = profile.device
    on_cuda, stated = device.kind == "cuda", bool(device.peak_tflops and device.bandwidth_gbs)
    tflops, gbs = (device.peak_tflops, device.bandwidth_gbs) if stated else (CPU_TFLOPS, CPU_GBS)
    assert tflops is not None and gbs is not None
    share = PRODUCT_SHARE * (FP32_SHARE if on_cuda and config.base_bytes == 4 and not config.autocast else 1.0)
    launch, micro_batch = LAUNCH_SECONDS, MICRO_BATCH_SECONDS
    link = HOST_LINK_GBS_ON_HOPPER if (device.compute_capability or 0.0) >= HOPPER else HOST_LINK_GBS
    if not on_cuda:
        launch, micro_batch, link = CPU_LAUNCH_SECONDS, CPU_MICRO_BATCH_SECONDS, CPU_COPY_GBS
    attention = tflops * 1e12 * _attention_share(profile, config, recipe)
    speed = Speed(tflops * 1e12 * share, gbs * 1e9, launch, on_cuda, micro_batch, stated, link * 1e9)
    return speed._replace(attention_flops=attention) if on_cuda and config.attention_scratch else speed


def _attention_share(profile: Profile, config: MemoryConfig, recipe: Recipe) -> float:
    capability = profile.device.compute_capability or 0.0
    if capability < HOPPER:
        return FLASH_SHARE
    by_cudnn = config.attention == "sdpa" and may_take_cudnn(recipe, profile, capability)
    return CUDNN_SHARE if by_cudnn else FLASH_SHARE_ON_HOPPER


class Parts(NamedTuple):
    """Seconds of a step, by what they are spent on."""

    products: float = 0.0
    between: float = 0.0
    """Moving bytes between the products: norms, activations, rotary embedding, residuals."""
    recompute: float = 0.0
    waiting: float = 0.0
    """For launches, or for copies to the host, as far as they take longer than the device's work."""
    micro_batches: float = 0.0
    """What each micro-batch costs beside its work."""
    update: float = 0.0

    def times(self, count: float) -> Parts:
        return Parts(*(count * each for each in self))

    def plus(self, other: Parts) -> Parts:
        return Parts(*(one + another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True)
class LayerWork:
    """What the layers of one kind do in a micro-batch."""

    learns: bool
    forward: Flops
    backward_share: float
    """FLOPs of backward as a multiple of those of forward."""
    weight_bytes: int
    launches: int
    """Kernels of forward."""
    saved: BytesPolynomial
    """What a layer that is not recomputed saves."""
    passes: tuple[float, float]
    """How often as many bytes pass through memory in forward and in backward."""
    tiled_share: float = 0.0
    """Share of forward that is a feed-forward block in pieces, which backward computes again."""
    tiled_launches: int = 0
    """Kernels of forward that the further pieces add."""
    tiled_again: bool = False
    """Whether a recomputed layer computes that block twice more: what follows it saves tensors for backward."""

    def seconds(self, speed: Speed, shape: Shape, rows: int, length: int) -> tuple[float, float, float]:
        """(products, between products, forward alone), without launches."""
        pairs, flops = self.forward.of_pairs(rows, length), self.forward.of(rows, length)
        attention = 0.0
        if speed.attention_flops is not None:
            attention, flops = pairs / speed.attention_flops, flops - pairs
        reading, moved = self.weight_bytes / speed.bytes, self.saved.at(shape) / speed.bytes
        once = max(flops / speed.flops, reading) + attention
        in_forward, in_backward = self.passes
        forward = once + in_forward * moved
        if not self.learns:
            return once, in_forward * moved, forward
        back = max(self.backward_share * flops / speed.flops, reading) + ATTENTION_BACKWARD * attention
        return once + back, (in_forward + in_backward) * moved, forward


@dataclass(frozen=True)
class StepTime:
    """The duration of steps of one run."""

    speed: Speed
    layers: tuple[LayerWork, ...]
    """In the order in which they become recomputed ones."""
    head: LayerWork
    update_bytes: int
    offloaded_state_bytes: int
    """Optimizer state that crosses to the device and back in each step."""
    batch: int
    sequence: int
    """Devices that share each sequence."""
    offloads: bool
    """Activations are copied to the host and back."""

    @classmethod
    def of(cls, predictor: Predictor) -> StepTime:
        arch, config = predictor.arch, replace(predictor.config, checkpointing=False, kept_layers=0)
        total = predictor.total
        on_host = state_on_host(arch, config, predictor.layout) if config.optimizer_offload else 0
        return cls(
            speed_of(predictor.profile, config, predictor.recipe),
            _layers(arch, replace(config, activation_offload=False)),
            _head(arch, config),
            total.optimizer + on_host + 2 * total.gradients,
            on_host,
            predictor.batch,
            predictor.layout.sequence,
            config.activation_offload,
        )

    def step(self, rows: int, length: int, recomputed: int) -> float:
        """Seconds of an optimizer step with micro-batches of `rows` sequences of `length` tokens, in which so many
        layers are recomputed."""
        return sum(self.parts(rows, length, recomputed))

    def parts(self, rows: int, length: int, recomputed: int) -> Parts:
        """The seconds of `step` by what they are spent on."""
        full, rest = divmod(self.batch, rows)
        found = self.micro_batch(rows, length, recomputed).times(full)
        if rest:
            found = found.plus(self.micro_batch(rest, length, recomputed))
        return found.plus(Parts(update=self.update))

    @property
    def update(self) -> float:
        """Seconds of the optimizer's step. Offloaded state goes both ways at once, beside the arithmetic."""
        on_device = UPDATE_PASSES * self.update_bytes / self.speed.bytes
        return max(on_device, self.offloaded_state_bytes / self.speed.link_bytes)

    def micro_batch(self, rows: int, length: int, recomputed: int) -> Parts:
        """The seconds of one micro-batch."""
        shape, known = shape_of(rows, length, 1), dict[LayerWork, tuple[float, float, float]]()
        products = between = recompute = launches = copied = 0.0
        for place, layer in enumerate(self.layers):
            if layer not in known:
                known[layer] = layer.seconds(self.speed, shape, rows, length)
            multiplied, moved, forward = known[layer]
            again = place < recomputed and layer.learns
            products, between, recompute = products + multiplied, between + moved, recompute + again * forward
            tiles_again = layer.learns and (layer.tiled_again or not again)
            recompute += tiles_again * layer.tiled_share * forward
            launches += layer.launches * (1 + again + 2 * layer.learns)
            launches += layer.tiled_launches * (1 + tiles_again + 2 * layer.learns)
            if self.offloads and not again:
                copied += 2 * layer.saved.at(shape) / self.speed.link_bytes
        multiplied, moved, _ = self.head.seconds(self.speed, shape, rows, length)
        work = Parts(products + multiplied, between + moved, recompute).times(1 / self.sequence)
        host = launches * self.speed.launch_seconds
        waiting = max(0.0, host - sum(work), copied - sum(work)) if self.speed.overlaps else host + copied
        return work.plus(Parts(waiting=waiting, micro_batches=self.speed.micro_batch_seconds))


@lru_cache(maxsize=64)
def _layers(arch: Architecture, config: MemoryConfig) -> tuple[LayerWork, ...]:
    kinds = layer_stack(arch, config).layers
    works = {kind: _work(arch, config, kind) for kind in set(kinds)}
    return tuple(works[kinds[layer]] for layer in recompute_order(arch, config))


def _work(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> LayerWork:
    parameters = layer_parameters(arch, kind.trainable.dense)
    base = layer_flops(arch, config, kind)
    adapters = adapter_weights(arch, config, kind)
    forward = base._replace(per_token=base.per_token + 2.0 * adapters)
    learned = trained_weights(arch, kind) + adapters
    backward_share = 1.0 + 2.0 * learned / forward.per_token
    weight_bytes = elements(parameters) * config.base_bytes
    launches = LAUNCHES_PER_LAYER + LAUNCHES_PER_ADAPTER * len(kind.trainable.adapted)
    saved = layer_forward(arch, config, kind).saved
    passes = (FUSED_FORWARD_PASSES, FUSED_BACKWARD_PASSES) if config.fused else (FORWARD_PASSES, BACKWARD_PASSES)
    work = LayerWork(kind.learns, forward, backward_share, weight_bytes, launches, saved, passes)
    if config.mlp_tiles == 1 or not kind.trainable.dense:
        return work
    block = sum(used_weights(arch, each) for each in parameters if each.name.startswith("mlp."))
    adapted = sum(name.startswith("mlp.") for name in kind.trainable.adapted)
    return replace(
        work,
        tiled_share=2.0 * block / forward.per_token,
        tiled_launches=(config.mlp_tiles - 1) * (LAUNCHES_PER_PIECE + LAUNCHES_PER_ADAPTER * adapted),
        tiled_again=arch.norms_per_layer == 4,
    )


@lru_cache(maxsize=64)
def _head(arch: Architecture, config: MemoryConfig) -> LayerWork:
    """Final norm, head and loss; every token is a target."""
    weights, learns = arch.vocab * arch.hidden, bool(static_bytes(arch, config).head_gradient)
    saved = BytesPolynomial((0, arch.vocab * 4, *[0] * 8))
    passes = FORWARD_PASSES, BACKWARD_PASSES
    return LayerWork(True, Flops(2.0 * weights, 0.0), 1.0 + learns, weights * config.base_bytes, 0, saved, passes)
