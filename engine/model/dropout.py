"""Dropout with masks that depend on a key, so that every retry, split and recomputation uses the same masks: LoRA's
dropout, and the dropout of the model itself (`engine.model.own_dropout`).

A hash decides whether an element is kept (`engine.model.dropout_masks`, and on CUDA `engine.model.dropout_kernel`).
`torch.nn.Dropout` uses a random generator, so its masks change with the split. Nothing is saved for backward; the mask
is computed again.

Try: `python -m pytest tests/model/test_dropout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import UsageError
from engine.model.dropout_kernel import drop
from engine.model.dropout_masks import RowKey, row_key


@dataclass(frozen=True)
class DropoutKey:
    """The values, besides module, position and feature, that determine the dropout masks of one forward pass."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    first_position: int = 0
    """Position in its sample of the first token of each row; above 0 only in slices of sequence parallelism."""


FUNCTIONAL = "_functional_dropout"
"""Attribute of a model that holds its `FunctionalDropout`, if it has one."""


class KeyedDropout(nn.Module):
    """Dropout whose masks, one for each sample (dimension 0), are determined by the `DropoutKey` that `keyed` sets.
    Identity in evaluation mode."""

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self.key: DropoutKey | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with dropped elements set to 0 and the others scaled by 1/(1-p); see `keyed_drop`.

        Raises:
            RuntimeError: used in training outside `keyed`.
        """
        if not self.training:
            return input
        if self.key is None:
            raise RuntimeError(f"dropout of {self.name} ran outside engine.model.dropout.keyed")
        return keyed_drop(input, self.key, self.name, self.p)


def keyed_drop(input: Tensor, key: DropoutKey, name: str, probability: float) -> Tensor:
    """Return `input` with dropped elements set to 0 and the others scaled by 1/(1-p), where p is `probability`. `name`
    is the dotted name of the dropout module: modules of different names draw different masks.

    B samples, S positions, F features. Shapes of `input`: [B, S, F]; [B·S, F] with the rows of a sample next to each
    other; attention weights of H heads, [B, H, S, S] or [B·H, S, S], where each head has masks of its own.

    Raises:
        UsageError: `input` has another shape, so that it is not known which dimension counts samples.
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
    """Return the number of heads H if `input` holds attention weights of B = `samples` samples, [B, H, S, S] or [B·H,
    S, S]; else 0."""
    if input.dim() == 4 and len(input) == samples:
        return input.shape[1]
    square = input.dim() == 3 and input.shape[1] == input.shape[2]
    return len(input) // samples if square and len(input) > samples and len(input) % samples == 0 else 0


class _Drop(torch.autograd.Function):
    """Computes x · mask / (1 - p). Backward computes the mask again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, input_BSF: Tensor, keys: list[RowKey], first: int, probability: float) -> Tensor:
        ctx.drawn = keys, first, probability
        return drop(input_BSF, *ctx.drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return drop(gradients[0], *ctx.drawn), None, None, None


def key_dropout(model: nn.Module, *, calls: bool = False) -> None:
    """Replace every active dropout module of the model and of peft's adapters by a KeyedDropout named after its layer.

    `calls`: the model also calls `torch.nn.functional.dropout`; masks of these calls are keyed, too
    (`FunctionalDropout`).
    """
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
    """Return the layers to pass to `keyed`: all that draw keyed masks in `model`. Searching a large model takes
    milliseconds, so call this once and reuse the list."""
    found: list[KeyedDropout | FunctionalDropout] = [m for m in model.modules() if isinstance(m, KeyedDropout)]
    return [*found, vars(model)[FUNCTIONAL]] if FUNCTIONAL in vars(model) else found


def follow_checkpoints(model: nn.Module) -> None:
    """Make recomputed layers of `model` draw the same dropout masks (`FunctionalDropout.follow_checkpoints`). Call this
    each time after gradient checkpointing is switched on."""
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
    """Inside the block, `layers` draw the dropout masks that belong to `seed`, the optimizer step `step` and the
    samples `sample_ids`, one id per row of the micro-batch. `first_position` is the position, in its sample, of each
    row's first token.

    Run both forward and backward inside the block: with checkpointing, backward computes the layers again.
    """
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
    """Keys the masks of calls of `torch.nn.functional.dropout` that a model's modules make.

    A call is named after the module whose forward makes it, and its number within this forward. Hooks follow which
    module that is. Checkpointing computes a layer again without its hooks; see `follow_checkpoints`.
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
        """Give the dropout calls of a checkpointed layer the same names when the layer is recomputed. Call this each
        time after gradient checkpointing is switched on."""
        for name, module in self._named.items():
            if "_gradient_checkpointing_func" in vars(module):
                checkpoint = partial(self._checkpoint, name, vars(module)["_gradient_checkpointing_func"])
                vars(module)["_gradient_checkpointing_func"] = checkpoint

    def _checkpoint(
        self, name: str, checkpoint: Callable[..., Any], layer: Callable[..., Any], *inputs: Any, **named: Any
    ) -> Any:
        """Call `checkpoint`, transformers' checkpointing function, on `layer`; returns its result. Each time `layer`
        runs, also in backward, its calls of dropout are named after `name`."""

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
        """Inside the block, `torch.nn.functional.dropout` draws keyed masks when one of the model's modules calls
        it. All threads are affected, as backward on CUDA has a thread of its own."""
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
