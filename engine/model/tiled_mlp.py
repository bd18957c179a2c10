"""Tiled MLP: the feed-forward blocks of decoder layers compute a long sequence in pieces, one after the other.

A block's intermediate values, several times as wide as its input, then exist for one piece alone. For backward the
block keeps its input, and computes each piece again just before that piece's gradients. The results are the same but
for rounding: the gradients of weights are sums over the pieces.

Blocks that compute each token by itself are found by asking: they take one tensor and nothing else, hold no router, and
give for two halves of a sequence what they give for the whole, which the proof `tiled_mlp` tries before the first step.

Shapes: B rows, S positions, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.model.adapted_linear import SHARED, SharedInput
from engine.model.adapters import router_modules
from engine.model.dropout import FUNCTIONAL, KeyedDropout
from engine.model.trained import checkpointing_layers, decoder_of


class MlpTiles:
    """The feed-forward blocks of a model that can be computed in pieces, each in `count` of them."""

    def __init__(self, blocks: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self.blocks = blocks
        """(layer, its block)."""
        self.count = 1
        """Pieces of each sequence; 1: blocks are computed as they are."""
        for _, block in blocks:
            block.forward = _TiledForward(self, block)

    @property
    def of_each_class(self) -> list[tuple[nn.Module, nn.Module]]:
        """(layer, its block) for one block of each class."""
        return list({type(block): (layer, block) for layer, block in self.blocks}.values())

    def compute(self, block: nn.Module, x: Tensor, count: int) -> Tensor:
        """The output of a block for x [B, S, H] in `count` pieces."""
        before, self.count = self.count, count
        try:
            output: Tensor = block.forward(x)
            return output
        finally:
            self.count = before

    def remove(self) -> None:
        """Give every block its own forward method back."""
        self.count = 1
        for _, block in self.blocks:
            replaced = block.__dict__.pop("forward").replaced
            if replaced is not None:
                block.forward = replaced


def tiles_of(model: nn.Module, base: PreTrainedModel) -> MlpTiles | None:
    """The blocks of `model`, of which `base` is inside peft's wrapper, that can be computed in pieces as far as their
    form tells; None if there are none."""
    if FUNCTIONAL in vars(model):  # calls of dropout are told apart by their number, which pieces would change
        return None
    routers = {id(base.get_submodule(name)) for name in router_modules(base)}
    layers = checkpointing_layers(decoder_of(base))
    blocks = [(layer, each) for layer in layers for each in layer.children() if _may_be_tokenwise(each, routers)]
    return MlpTiles(blocks) if blocks else None


def _may_be_tokenwise(block: nn.Module, routers: set[int]) -> bool:
    """Whether a block takes one tensor and nothing else, and is made of several linear layers without a router: the
    tokens that each expert gets are counted for whole sequences."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return False
    inside = list(block.modules())
    return not any(id(module) in routers for module in inside) and sum(map(_is_linear, inside)) > 1


def _is_linear(module: Any) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def input_size(block: Any) -> int:
    """H, by the block's first linear layer."""
    first = next(module for module in block.modules() if _is_linear(module))
    size: int = first.weight.shape[0] if isinstance(first, Conv1D) else first.in_features
    return size


class _TiledForward:
    """The forward method of one block."""

    def __init__(self, owner: MlpTiles, block: nn.Module) -> None:
        self._owner, self._block = owner, block
        self.replaced: Callable[[Tensor], Tensor] | None = block.__dict__.get("forward")
        """A forward method of the instance, such as that of a fused kernel; None: that of the class."""
        self._dropouts = [module for module in block.modules() if isinstance(module, KeyedDropout)]
        shared = (getattr(module, SHARED, None) for module in block.modules())
        self._shared = {id(each): each for each in shared if isinstance(each, SharedInput)}.values()

    def __call__(self, x: Tensor) -> Tensor:
        length = x.shape[1] if x.dim() == 3 else 1
        if self._owner.count == 1 or length == 1:
            return self._whole(x)
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self._block.parameters())):
            apply: Callable[..., Tensor] = _Tiled.apply
            keep: Callable[..., Tensor] = _Keep.apply
            return apply(x, keep(x, x.new_empty(0).requires_grad_()), self)
        with torch.no_grad():
            return self.in_pieces(x)

    def _whole(self, x: Tensor) -> Tensor:
        output: Tensor = self.replaced(x) if self.replaced is not None else type(self._block).forward(self._block, x)
        return output

    def spans(self, x: Tensor) -> list[slice]:
        length = x.shape[1]
        size = -(-length // self._owner.count)
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]

    def in_pieces(self, x: Tensor) -> Tensor:
        output: Tensor | None = None
        for span in self.spans(x):
            made = self.piece(x[:, span].clone(), span.start)
            if output is None:
                output = made.new_empty((*x.shape[:-1], made.shape[-1]))
            output[:, span] = made
            del made  # before the next piece is computed
        assert output is not None
        return output

    def piece(self, x: Tensor, first: int) -> Tensor:
        """The output for a piece of the sequence that begins at position `first`, with the same dropout as in whole."""
        try:
            with self._dropping_from(first):
                return self._whole(x)
        finally:
            for shared in self._shared:
                shared.close()

    @contextmanager
    def _dropping_from(self, first: int) -> Iterator[None]:
        keys = [dropout.key for dropout in self._dropouts]
        for dropout, key in zip(self._dropouts, keys, strict=True):
            dropout.key = key and replace(key, first_position=key.first_position + first)
        try:
            yield
        finally:
            for dropout, key in zip(self._dropouts, keys, strict=True):
                dropout.key = key


class _Keep(torch.autograd.Function):
    """Saves a block's input before the block is computed: a layer that is recomputed only up to what backward needs
    then need not compute the block. Its output, without elements, requires a gradient in any case: the block's own
    weights may be all that learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nothing: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nothing.view_as(nothing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, tiled: _TiledForward) -> Tensor:
        ctx.kept, ctx.tiled = kept.grad_fn, tiled
        return tiled.in_pieces(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.kept.saved_tensors
        wanted = ctx.needs_input_grad[0]
        grad_x = torch.empty_like(x) if wanted else None
        for span in ctx.tiled.spans(x):
            piece = x[:, span].detach().clone().requires_grad_(wanted)
            with torch.enable_grad():
                output = ctx.tiled.piece(piece, span.start)
            torch.autograd.backward(output, gradients[0][:, span].clone())
            if grad_x is not None:
                grad_x[:, span] = piece.grad
            del piece, output  # before the next piece is computed
        return grad_x, None, None
