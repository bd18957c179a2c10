"""`MemoryConfig`: the choices of a run spec that decide memory (mixed precision, gradient checkpointing, attention
kernel, offload), with every "auto" resolved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from engine.architecture.continued import continued
from engine.architecture.facts import Architecture
from engine.architecture.lookup import added_tokens
from engine.architecture.parameters import VISION_MODULES, globs_of_parts
from engine.config.attention import FLASH_KERNELS, HOPPER, AttentionCard, AttentionNeeds, Obstacle, choose_kernel
from engine.config.check.data_rules import image_key
from engine.config.files.machine import installed
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BFLOAT16_CAPABILITY = 8.0
"""First compute capability with bf16 tensor cores (Ampere)."""

CHUNK_LOGIT_BYTES = 64 * 2**20
"""What one chunk's fp32 logits may always take; see `chunk_tokens`."""
CHUNK_CAPACITY_SHARE = 64
"""One chunk's fp32 logits may also take one part in so many of the device's memory, up to FULL_CHUNK_TOKENS."""
FULL_CHUNK_TOKENS = 512
"""Tokens per chunk from which on the product with the head is limited by arithmetic: each chunk reads the head's
weights once, and an H100 makes 295 multiply-adds while it reads one bf16 weight (datasheet: 989 TFLOP/s over 3.35
TB/s)."""

ROUTERS = ("**.mlp.gate", "**.mlp.router")
"""What `moe.freeze_router` freezes."""

Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "sgd"]
Rounding = Literal["exact", "stochastic", "nearest"]


class Patterns(NamedTuple):
    """The recipe's patterns for trained and adapted weights."""

    lora: bool
    targets: tuple[str, ...] | str
    exclude: tuple[str, ...]
    layers: tuple[int, ...]
    also_train: tuple[str, ...]
    train_only: tuple[str, ...]
    freeze: tuple[str, ...]


PlannedLoss = Literal["plain", "chunked", "liger", "fused"]
"""As train.loss; "liger": in chunks, by Liger's kernel, if the head is a plain linear layer."""


@dataclass(frozen=True)
class MemoryConfig:
    """The choices of a run that decide its memory, apart from the architecture and the shape of a micro-batch."""

    dtype: str
    """dtype of the base weights and of hidden states."""
    adapter_dtype: str | None
    """None without LoRA."""
    rank: int
    patterns: Patterns
    token_rows: int
    """Rows of embedding and head that are trained beside LoRA, of added tokens; 0 without."""
    dora: bool
    dropout: bool
    checkpointing: bool
    """Gradient checkpointing: layers are recomputed in backward, all but `kept_layers` of the decoder."""
    activation_offload: bool
    """Tensors saved for backward are moved to the host until backward needs them."""
    loss: PlannedLoss
    chunk_tokens: int
    optimizer: Optimizer
    rounding: Rounding
    """How updates of weights trained in bf16 are rounded."""
    state_dtype: str
    """dtype of the optimizer's state for weights trained in bf16."""
    optimizer_offload: bool
    """The optimizer's state is in host memory between steps."""
    momentum: bool
    attention: Literal["flash", "sdpa", "eager"]
    packed: bool
    """A row holds several documents, separated by the attention mask. (Padding on the right needs no mask.)"""
    window_reached: bool
    """Sequences may be longer than the model's sliding window."""
    quantized: bool
    autocast: bool
    """Mixed precision with fp32 weights: full fine-tuning in float16, where autocast multiplies fp16 copies of them."""
    image_patches: int
    """Patches of the image that each sequence is planned with; 0 for text alone."""
    sequence: int
    """Devices that share each sequence."""
    metered: bool
    """The run is on the metered device, whose dispatch mode makes autograd add gradients out of place."""
    attention_dropout: bool = False
    """The model's own dropout of attention weights, which exist as a tensor only in eager attention."""
    residual_dropout: bool = False
    """The model's own dropout of hidden states before a residual connection."""
    embedding_dropout: bool = False
    """The model's own dropout of the first layer's input."""
    fused_dropout: bool = False
    """A kernel draws dropout masks without allocating memory for them; true on CUDA."""
    prefetches: bool = False
    """While one offloaded activation is used, the next one is already copied back to the device; true on CUDA."""
    attention_scratch: bool = False
    """Attention's backward in half precision has scratch of its own; true on CUDA, except in eager attention."""
    fused: bool = False
    """Fused kernels compute norms, gated feed-forward blocks and rotary embedding in decoder layers."""
    watches_experts: bool = False
    """Router logits of all layers are kept to the end of the forward pass, to count how often each expert is chosen."""
    balances_experts: bool | None = False
    """The auxiliary loss is computed from the router logits; None: only if a router is trained."""
    one_row: bool = False
    """A single sequence, for which the model saves different tensors than for several; see `for_rows`."""
    mlp_tiles: int = 1
    """Pieces of each sequence in which dense feed-forward blocks are computed."""
    kept_layers: int = 0
    """With checkpointing: decoder layers that keep their activations all the same, the last of `recompute_order`."""

    @property
    def lora(self) -> bool:
        """Adapters are trained and the base is frozen."""
        return self.patterns.lora

    @property
    def base_bytes(self) -> int:
        """Bytes per base weight and per hidden value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def adapter_bytes(self) -> int:
        """Bytes per adapter weight; 0 without LoRA."""
        return DTYPE_BYTES[self.adapter_dtype] if self.adapter_dtype else 0

    @property
    def casts_adapters(self) -> bool:
        """Adapters have another dtype than hidden states, and are cast to it for each use."""
        return self.adapter_dtype is not None and self.adapter_dtype != self.dtype

    @property
    def trains_in_bfloat16(self) -> bool:
        """Whether any weight is trained in bf16: adapters, or weights themselves."""
        in_full = not self.lora or bool(self.patterns.also_train)
        return self.adapter_dtype == "bfloat16" or (self.dtype == "bfloat16" and in_full)

    def updates_in_scratch(self, dtype: str) -> bool:
        """Whether trained weights of this dtype are updated in fp32 scratch, not by the optimizer directly."""
        return dtype == "bfloat16" and (self.rounding, self.state_dtype) != ("nearest", "bfloat16")


def memory_config_of(arch: Architecture, spec: RunSpec) -> MemoryConfig:
    """The choices of a run spec, with every "auto" resolved for this architecture."""
    recipe, device = continued(spec.recipe, arch), spec.profile.device
    method, train, data, lora = recipe.method, recipe.train, recipe.data, recipe.method.kind == "lora"
    computed, attention = resolved_dtype(spec), resolved_attention(arch, spec)
    autocast = computed == "float16" and not lora
    return MemoryConfig(
        dtype="float32" if autocast else computed,
        adapter_dtype=method.adapter_dtype if lora else None,
        rank=method.rank if lora else 0,
        patterns=patterns_of(arch, recipe),
        token_rows=len(added_tokens(recipe.model)) if lora else 0,
        dora=lora and method.dora,
        dropout=lora and method.dropout > 0,
        checkpointing=train.gradient_checkpointing is not False,
        kept_layers=_kept_layers(arch, train.gradient_checkpointing),
        mlp_tiles=1 if why_whole(arch, spec) else train.mlp_tiles,
        activation_offload=train.activation_offload and device.kind != "cpu",
        loss=resolved_loss(spec),
        chunk_tokens=chunk_tokens(arch.vocab, device.capacity_bytes),
        optimizer=train.optimizer,
        rounding=train.rounding,
        state_dtype=train.state_dtype,
        optimizer_offload=train.optimizer_offload and device.kind != "cpu",
        momentum=train.momentum > 0,
        attention=attention,
        packed=data.packing,
        window_reached=arch.sliding_window is not None and data.max_length > arch.sliding_window,
        autocast=autocast,
        quantized=recipe.model.quantize == "nf4",
        image_patches=image_patches(arch, recipe),
        sequence=spec.profile.parallel.sequence,
        metered=device.kind == "metered",
        attention_dropout=arch.attention_dropout
        and attention == "eager"
        and recipe.model.attention_dropout != "off"
        and spec.profile.parallel.sequence == 1,
        fused_dropout=device.kind == "cuda",
        prefetches=device.kind == "cuda" and train.activation_offload,
        attention_scratch=device.kind == "cuda" and attention != "eager",
        residual_dropout=arch.residual_dropout,
        embedding_dropout=arch.embedding_dropout,
        fused=fused_kernels(spec),
        watches_experts=arch.experts is not None and recipe.moe.watch_experts,
        balances_experts=_balances_experts(arch, recipe),
    )


def why_whole(arch: Architecture, spec: RunSpec) -> str:
    """Why feed-forward blocks cannot be computed in pieces; empty if they can."""
    if not arch.has_dense_layers:
        return "every layer of this model is a mixture of experts"
    if resolved_dtype(spec) == "float16" and spec.recipe.method.kind == "full":
        return "fp32 weights are computed in float16 and would be cast again for each piece"
    attention = arch.attention_dropout and spec.recipe.model.attention_dropout == "keep"
    eager = arch.attention_dropout and resolved_attention(arch, spec) == "eager"
    if arch.residual_dropout or arch.embedding_dropout or attention or eager:
        return "this model has its own dropout, whose masks are distinguished by the number of calls"
    return ""


def _kept_layers(arch: Architecture, recomputed: bool | int | Literal["auto"]) -> int:
    """Layers beyond the first `recomputed`. "auto" counts as all layers until a plan has found a number."""
    if isinstance(recomputed, (bool, str)):
        return 0
    return max(0, arch.layers - recomputed)


def patterns_of(arch: Architecture, recipe: Recipe) -> Patterns:
    """The patterns of a recipe, plus those of modules that are frozen by default in full fine-tuning."""
    method = recipe.method
    by_default = () if method.train_only or method.kind == "lora" else _frozen_by_default(arch, recipe)
    return Patterns(
        lora=method.kind == "lora",
        targets=method.targets if isinstance(method.targets, str) else tuple(method.targets),
        exclude=tuple(method.exclude),
        layers=tuple(method.layers),
        also_train=(*method.also_train, *(ROUTERS if arch.experts and not recipe.freezes_router else ())),
        train_only=tuple(method.train_only),
        freeze=(*globs_of_parts(method.freeze, arch), *by_default),
    )


def _balances_experts(arch: Architecture, recipe: Recipe) -> bool | None:
    """None: only if a router is trained."""
    weight = recipe.moe.aux_loss_weight
    if arch.experts is None or not (arch.experts.auxiliary_loss if weight is None else weight):
        return False
    return None if weight is None else True


def for_rows(arch: Architecture, config: MemoryConfig, rows: int) -> MemoryConfig:
    """The config for `rows` sequences. With one, Phi-3's eager attention saves a view of the values, and thereby its
    whole joint projection; with several, or if heads are repeated, a copy of the values."""
    apart = arch.layout == "phi3" and config.attention == "eager" and arch.kv_heads == arch.heads
    return replace(config, one_row=True) if apart and rows == 1 else config


def image_patches(arch: Architecture, recipe: Recipe) -> int:
    """Patches of the largest image that the recipe allows and a sequence holds; samples with larger ones are dropped. 0
    without images or a vision encoder."""
    encoder = arch.vision_encoder
    if encoder is None or image_key(recipe) is None:
        return 0
    if encoder.patches is not None:
        return encoder.patches
    return min(encoder.tokens_of(recipe.data.image_max_pixels), recipe.data.max_length) * encoder.merge**2


def _frozen_by_default(arch: Architecture, recipe: Recipe) -> tuple[str, ...]:
    """Frozen in full fine-tuning if `train_only` is empty: routers, and a vision encoder that gets no images."""
    routers = ROUTERS if arch.experts and recipe.freezes_router else ()
    return (*routers, *(VISION_MODULES if arch.vision_encoder and not image_patches(arch, recipe) else ()))


def resolved_dtype(spec: RunSpec) -> str:
    """ "auto" is bfloat16 or float16 on CUDA, by compute capability, and float32 in host memory."""
    asked, device = spec.recipe.model.dtype, spec.profile.device
    if asked != "auto":
        return asked
    if device.kind != "cuda":
        return "float32"
    return "float16" if (device.compute_capability or BFLOAT16_CAPABILITY) < BFLOAT16_CAPABILITY else "bfloat16"


def fused_kernels(spec: RunSpec) -> bool:
    """Whether fused kernels replace modules of decoder layers."""
    return wants_fused_kernels(spec) and bool(installed("liger-kernel"))


def wants_fused_kernels(spec: RunSpec) -> bool:
    """Whether fused kernels would replace modules if they are installed; not in compiled layers, and not under
    autocast, whose products of fp32 weights are not in the inputs' dtype."""
    recipe = spec.recipe
    autocast = recipe.method.kind != "lora" and resolved_dtype(spec) == "float16"
    wanted = recipe.model.kernels == "auto" and not recipe.train.compile
    return spec.profile.device.kind == "cuda" and wanted and not autocast


def resolved_loss(spec: RunSpec) -> PlannedLoss:
    """What "auto" and "fused" are planned as: Liger's kernel on CUDA where it is installed, else the engine's chunked
    loss, and torch's."""
    asked = spec.recipe.train.loss
    if asked in ("auto", "fused") and spec.profile.device.kind == "cuda" and installed("liger-kernel"):
        return "liger"
    return "chunked" if asked == "auto" else asked


def chunk_tokens(vocab: int, capacity_bytes: int) -> int:
    """Tokens per chunk of the loss on a device of `capacity_bytes`, at least 1.

    As many as have fp32 logits of CHUNK_LOGIT_BYTES, or of 1/CHUNK_CAPACITY_SHARE of the capacity if that is more, then
    at most FULL_CHUNK_TOKENS. The second rule serves large vocabularies: the first allows 110 tokens for 152,000.
    """
    per_token = 4 * vocab
    by_capacity = min(FULL_CHUNK_TOKENS, capacity_bytes // CHUNK_CAPACITY_SHARE // per_token)
    return max(1, CHUNK_LOGIT_BYTES // per_token, by_capacity)


def resolved_attention(arch: Architecture, spec: RunSpec) -> Literal["flash", "sdpa", "eager"]:
    """The kernel that the run would choose from the packages installed here. All flash kernels save the same."""
    recipe, device = spec.recipe, spec.profile.device
    card = AttentionCard(device.kind, device.compute_capability, device.kind == "cuda", resolved_dtype(spec))
    chosen = choose_kernel(
        recipe.model.attention,
        attention_needs(arch),
        card,
        _not_installed,
        packing=recipe.data.packing,
        deterministic=recipe.train.deterministic,
    )
    if chosen.name == "sdpa":
        return "sdpa"
    return "eager" if chosen.name == "eager" else "flash"


def may_take_cudnn(recipe: Recipe, profile: Profile, capability: float) -> bool:
    """Whether the run may compute attention by cuDNN's kernel on a GPU of this compute capability, where it leaves it
    to torch's sdpa.

    Left out are runs that name a kernel or must repeat to the bit, compiled layers, packed rows, which have a mask or a
    kernel of their own, preferences, whose log-probabilities are compared across micro-batches, and ranks that share
    sequences.
    """
    other = recipe.train.deterministic or recipe.train.compile or recipe.data.packing or recipe.learns_preferences
    own = recipe.model.attention != "auto" or other or profile.parallel.sequence > 1
    return capability >= HOPPER and not own


def attention_needs(arch: Architecture) -> AttentionNeeds:
    """The facts of a model that decide which attention kernels can compute it."""
    return AttentionNeeds(
        arch.layout,
        arch.head_dim,
        has_flash=True,
        # transformers computes gpt-oss with kernels from the hub alone, which no recipe can name.
        flash_only=() if arch.layout == "gpt_oss" else None,
        has_sdpa=arch.default_attention != "eager",
        softcap=arch.attention_softcap is not None,
        dropout="attention dropout" if arch.attention_dropout else "",
    )


def _not_installed(kernel: str) -> Obstacle | None:
    package = FLASH_KERNELS[kernel].package
    # A machine that only plans may have no torch; the one that trains has it.
    if kernel == "varlen" or installed(package):
        return None
    return Obstacle(f"needs the package {package}, which is not installed", unexpected=False)
