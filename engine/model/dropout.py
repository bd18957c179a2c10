"""Dropout with masks that depend on a key (seed, step, sample, module), so that every retry, split and recomputation
uses the same masks: LoRA's dropout, and the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from engine.errors import UsageError
from engine.model.dropout_kernel import drop
from engine.model.dropout_key import RowKey, row_key


@dataclass(frozen=True)
class DropoutKey:
    """What determines the masks of one forward pass, besides module, position and feature."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    first_position: int = 0
    """Position in its sample of each row's first token; above 0 only in slices of sequence parallelism."""


FUNCTIONAL = "_functional_dropout"
"""Attribute of a model that holds its `FunctionalDropout`, if it has one."""


class KeyedDropout(nn.Module):
    """Dropout with a mask per sample (dimension 0) from the key that `keyed` sets; identity in evaluation."""

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self.key: DropoutKey | None = None

    def forward(self, input: Tensor) -> Tensor:
        """See `keyed_drop`. RuntimeError: used in training outside `keyed`."""
        if not self.training:
            return input
        if self.key is None:
            raise RuntimeError(f"dropout of {self.name} ran outside engine.model.dropout.keyed")
        return keyed_drop(input, self.key, self.name, self.p)


def keyed_drop(input: Tensor, key: DropoutKey, name: str, probability: float) -> Tensor:
    """`input` with dropped elements set to 0 and the others scaled by 1/(1-p), p the `probability`; modules of
    different names draw different masks.

    Shapes of `input`: [B, S, F]; [B·S, F] with a sample's rows next to each other; attention weights of H heads, [B, H,
    S, S] or [B·H, S, S], with masks of their own per head. UsageError: any other shape.
    """
    samples = key.sample_ids
    first, shape = input.shape[0], input.shape
    heads = _heads(input, len(samples)) if not key.first_position else 0
    if heads:
        names = [f"{name}.{head}" for head in range(heads)] * len(samples)
        rows = input.reshape(-1, *shape[-2:])
        drawn = [sample for sample in samples for _ in range(heads)]
    elif (input.dim() == 3 and first == len(samples)) or (input.dim() == 2 and first % len(samples) == 0):
        rows, names, drawn = input.reshape(len(samples), -1, shape[-1]), [name] * len(samples), list(samples)
    else:
        raise UsageError(
            f"dropout of {name}: masks cannot be keyed by sample in a tensor of shape {tuple(shape)}",
            expected=f"[{len(samples)}, S, F], [{len(samples)} · S, F] or [{len(samples)}, H, S, S]",
            fix="set the dropouts in the model's config.json to 0, or choose another model.id",
        )
    keys = [row_key(key.seed, key.step, sample, each) for sample, each in zip(drawn, names, strict=True)]
    apply: Callable[..., Tensor] = _Drop.apply
    return apply(rows, keys, key.first_position, probability).view(shape)


def _heads(input: Tensor, samples: int) -> int:
    """The number of heads H if `input` holds attention weights [B, H, S, S] or [B·H, S, S], B = `samples`; else 0."""
    if input.dim() == 4 and len(input) == samples:
        return input.shape[1]
    square = input.dim() == 3 and input.shape[1] == input.shape[2]
    return len(input) // samples if square and len(input) > samples and len(input) % samples == 0 else 0


class _Drop(torch.autograd.Function):
    """x · mask / (1 - p). Backward computes the mask again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, input_BSF: Tensor, keys: list[RowKey], first: int, probability: float) -> Tensor:
        ctx.drawn = keys, first, probability
        return drop(input_BSF, *ctx.drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return drop(gradients[0], *ctx.drawn), None, None, None


def key_dropout(model: nn.Module, *, calls: bool = False) -> None:
    """Replace every active dropout module of the model and of peft's adapters by a KeyedDropout named after its layer;
    with `calls` also key calls of `torch.nn.functional.dropout` (`FunctionalDropout`)."""
    for name, module in list(model.named_modules()):
        for place, child in list(module.named_children()):
            if type(child) is nn.Dropout and child.p > 0:
                # peft keeps the dropouts of a layer in a dict, by adapter: they are named after the layer.
                owner, _, last = name.rpartition(".")
                known = owner if last == "lora_dropout" else f"{name}.{place}".lstrip(".")
                module._modules[place] = KeyedDropout(child.p, known).train(child.training)
    if calls:
        vars(model)[FUNCTIONAL] = FunctionalDropout(model)


def keyed_dropouts(model: nn.Module) -> list[KeyedDropout | FunctionalDropout]:
    """The layers to pass to `keyed`. The search takes milliseconds on a large model: call it once."""
    found: list[KeyedDropout | FunctionalDropout] = [m for m in model.modules() if isinstance(m, KeyedDropout)]
    return [*found, vars(model)[FUNCTIONAL]] if FUNCTIONAL in vars(model) else found


def follow_checkpoints(model: nn.Module) -> None:
    """Make recomputed layers draw the same masks. Call this each time gradient checkpointing is switched on."""
    if FUNCTIONAL in vars(model):
        vars(model)[FUNCTIONAL].follow_checkpoints()


@contextmanager
def keyed(
    layers: Sequence[KeyedDropout | FunctionalDropout],
    *,
    seed: int,
    step: int,
    sample_ids: Sequence[int],
    first_position: int = 0,
) -> Iterator[None]:
    """Inside the block, `layers` draw the masks of `seed`, optimizer step and `sample_ids` (one per row of the
    micro-batch); `first_position`: each row's first token in its sample. Backward belongs inside too: with
    checkpointing it computes layers again."""
    key = DropoutKey(seed, step, tuple(int(sample) for sample in sample_ids), first_position)
    with ExitStack() as intercepting:
        for layer in layers:
            layer.key = key
            if isinstance(layer, FunctionalDropout):
                intercepting.enter_context(layer.intercepting())
        try:
            yield
        finally:
            for layer in layers:
                layer.key = None


class FunctionalDropout:
    """Keys the masks of the calls of `torch.nn.functional.dropout` that a model's modules make.

    A call is named after the module whose forward makes it (followed by hooks) and its number within this forward.
    Checkpointing computes a layer again without its hooks; see `follow_checkpoints`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.key: DropoutKey | None = None
        self._running: list[_Caller] = []
        """Modules whose forward is running, the innermost last."""
        self._named = {
            name: module
            for name, module in model.named_modules()
            if next(module.children(), None) is not None and not isinstance(module, LoraLayer)
        }
        for name, module in self._named.items():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave, always_call=True)

    def follow_checkpoints(self) -> None:
        """Name a recomputed layer's calls as before. Call this each time gradient checkpointing is switched on."""
        for name, module in self._named.items():
            if "_gradient_checkpointing_func" in vars(module):
                checkpoint = partial(self._checkpoint, name, vars(module)["_gradient_checkpointing_func"])
                vars(module)["_gradient_checkpointing_func"] = checkpoint

    def _checkpoint(
        self, name: str, checkpoint: Callable[..., Any], layer: Callable[..., Any], *inputs: Any, **named: Any
    ) -> Any:
        """Checkpoint `layer`; its dropout calls, also in backward, are named after `name`."""

        def followed(*inputs: Any, **named: Any) -> Any:
            depth = len(self._running)
            self._running.append(_Caller(name))
            try:
                return layer(*inputs, **named)
            finally:
                del self._running[depth:]

        return checkpoint(followed, *inputs, **named)

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Inside the block, the model's calls draw keyed masks, in all threads: backward on CUDA has one of its own."""
        former = functional.dropout

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if not training or p == 0 or self.key is None or not self._running:
                return former(input, p, training, inplace)
            caller = self._running[-1]
            caller.calls += 1
            return keyed_drop(input, self.key, f"{caller.name}.dropout{caller.calls}", p)

        self._running.clear()
        functional.dropout = dropout
        try:
            yield
        finally:
            functional.dropout = former

    def _enter(self, name: str, _module: nn.Module, _inputs: object) -> None:
        self._running.append(_Caller(name))

    def _leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        if self._running:
            self._running.pop()


@dataclass
class _Caller:
    """A module whose forward is running, and how often it has called dropout."""

    name: str
    calls: int = 0


ATTENTION_KEYS = frozenset({"attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"})
"""Keys of transformers' configs with the probability of dropping attention weights."""

SKIPPING_KEYS = frozenset({"layerdrop", "decoder_layerdrop", "encoder_layerdrop", "drop_path_rate"})
"""Keys with the probability of skipping a whole layer."""

UNUSED_PREFIXES = ("classifier", "summary", "seq_classif", "qa_")
"""Prefixes of keys that causal models do not read: they belong to classifiers made of the same config."""

KERNELS_THAT_DROP = ("sdpa", "flash_attention_2")
"""Attention kernels on CUDA that have dropout themselves."""


def settle_dropout(
    config: PreTrainedConfig, kernel: str, asked: Literal["auto", "keep", "off"], *, cuda: bool, shared: bool
) -> list[str]:
    """Set dropout that the run does not keep to 0 in `config`, before a model is made of it; returns a notice for each
    key, except for attention dropout that the recipe switches off.

    `kernel`: transformers' name of the attention kernel; `asked`: model.attention_dropout; `shared`: ranks share
    sequences, so that each has a part of the attention weights.

    Keyed are hidden states and, with eager attention, attention weights; other kernels draw from torch's generator, so
    their masks change with the micro-batch. A vision encoder's rows are patches or images, not samples.
    """
    notices: list[str] = []
    keyed = kernel == "eager" and not shared
    kept = asked != "off" and (keyed or (asked == "keep" and cuda and kernel in KERNELS_THAT_DROP))
    for path, part in _parts(config):
        for key in active_dropouts(part):
            if _in_encoder(path):
                notices.append(_switched_off(path + key, "only the decoder's dropout is keyed"))
            elif key in SKIPPING_KEYS:
                notices.append(_switched_off(path + key, "the layers it skips would depend on the micro-batch"))
            elif key not in ATTENTION_KEYS or kept:
                continue
            elif asked != "off":
                notices.append(_lost_attention_dropout(f"{path}{key} = {getattr(part, key):g}", kernel, asked, shared))
            setattr(part, key, 0.0)
    return notices


def has_dropout(config: PreTrainedConfig) -> bool:
    return any(active_dropouts(part) for _, part in _parts(config))


def active_dropouts(config: PreTrainedConfig) -> list[str]:
    """The config's keys with a dropout probability above 0."""
    return [
        key
        for key, value in vars(config).items()
        if "drop" in key and not key.startswith(UNUSED_PREFIXES) and isinstance(value, float | int) and value > 0
    ]


def _parts(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """The config and those inside it, each with its dotted path ("text_config.")."""
    yield path, config
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, f"{path}{name}.")


def _in_encoder(path: str) -> bool:
    return any(word in path for word in ("vision", "audio", "speech", "encoder"))


def _switched_off(what: str, reason: str) -> str:
    return f"{what} of the model's config is disabled: {reason}"


def _lost_attention_dropout(what: str, kernel: str, asked: str, shared: bool) -> str:
    if shared:
        return _switched_off(what, "ranks that share sequences have only parts of the masks")
    if asked == "keep":
        return _switched_off(what, f'{kernel} does not support dropout here; model.attention = "eager" does')
    return _switched_off(
        what,
        f"the masks of {kernel} would depend on the micro-batch; to keep dropout, set model.attention = "
        '"eager", or model.attention_dropout = "keep", with which an out-of-memory error changes the '
        'training result; "off" removes this notice',
    )
