"""Fused kernels in decoder layers: RMS norms, gated feed-forward blocks and rotary embedding, each by one kernel of
Liger's in place of several operations, which read and write every hidden state several times.

What a module computes is asked of the module's own class, on a few numbers in host memory, and never told by its name
alone: a class that computes anything else keeps its own operations. Before the first step the proof `fused` compares
every decoder layer with the layer as it is, on the run's own samples.

Shapes: B rows, S positions, H hidden size, D head size, N tokens (B · S).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.liger import NormForm, in_use
from engine.model.trained import checkpointing_layers

ASKED_SIZE = 6
ASKED_EPS = 1e-2
"""Large enough to show where a norm adds it."""
ROTARY = "apply_rotary_pos_emb"
"""The function of a family's modelling file that rotates queries and keys."""
LINEARS = ("gate_proj", "up_proj", "down_proj")


class _Norm(torch.autograd.Function):
    """Saves its input and a number per token, where torch's operations save the input in fp32 twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> Tensor:
        x = x.contiguous()
        output, reciprocal_N, ctx.launch = in_use().norm(x, weight_H, eps, form)
        ctx.save_for_backward(x, weight_H, reciprocal_N)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, reciprocal_N = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        found = in_use().norm_backward(grads[0].contiguous(), x, weight_H, reciprocal_N, ctx.launch, trained)
        return *found, None, None


class _Gated(torch.autograd.Function):
    """Saves gate and up, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gate, up, ctx.activation = gate.contiguous(), up.contiguous(), activation
        ctx.save_for_backward(gate, up)
        return in_use().gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *in_use().gated_backward(gate, up, grads[0].contiguous(), ctx.activation), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return in_use().rotate(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *in_use().rotate(*grads, *ctx.saved_tensors, back=True), None, None


class FusedModules:
    """The norms, gated blocks and rotary functions of a model's decoder layers that Liger's kernels can compute.

    While `on` is true, these kernels compute them.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.on = True
        self.layers = list(checkpointing_layers(decoder))
        self.norms = self.gates = 0
        self._rotary: dict[ModuleType, Callable[..., Any]] = {}
        for layer in self.layers:
            for module in layer.modules():
                self._replace(module)

    def __bool__(self) -> bool:
        return bool(self.norms or self.gates or self._rotary)

    def __str__(self) -> str:
        parts = {"RMS norms": self.norms, "feed-forward blocks": self.gates, "rotary embedding": len(self._rotary)}
        return ", ".join(name for name, count in parts.items() if count)

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated by the kernel."""
        return bool(self._rotary)

    def _replace(self, module: nn.Module) -> None:
        form, activation = norm_form(type(module)), gated_activation(module)
        if form is not None and isinstance(getattr(module, "weight", None), Tensor):
            self.norms += 1
            module.forward = _FusedNorm(self, module, form)
        elif activation is not None:
            self.gates += 1
            module.forward = _FusedGate(self, module, activation)
        family = sys.modules[type(module).__module__]
        own = getattr(family, ROTARY, None)
        if own is not None and not isinstance(own, _FusedRotary) and rotates_by_halves(own):
            self._rotary[family] = own
            setattr(family, ROTARY, _FusedRotary(self, own))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, the modules compute what they compute without this class."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def remove(self) -> None:
        """Give every module and function back its own operations."""
        self.on = False
        for layer in self.layers:
            for module in layer.modules():
                if isinstance(module.__dict__.get("forward"), (_FusedNorm, _FusedGate)):
                    del module.__dict__["forward"]
        for family, own in self._rotary.items():
            setattr(family, ROTARY, own)


class _FusedNorm:
    """The forward method of one norm."""

    def __init__(self, owner: FusedModules, norm: Any, form: NormForm) -> None:
        self._owner, self._norm, self._form = owner, norm, form

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        # Autocast with fp32 weights: the class's own operations give fp32 for half-precision input.
        if not self._owner.on or x.dtype != norm.weight.dtype:
            output: Tensor = type(norm).forward(norm, x)
            return output
        apply: Callable[..., Tensor] = _Norm.apply
        if x.dim() == 4 and not x.is_contiguous():  # heads before positions: without a copy, in their order in memory
            return apply(x.transpose(1, 2), norm.weight, _eps(norm), self._form).transpose(1, 2)
        return apply(x, norm.weight, _eps(norm), self._form)


class _FusedGate:
    """The forward method of one gated feed-forward block."""

    def __init__(self, owner: FusedModules, block: Any, activation: str) -> None:
        self._owner, self._block, self._activation = owner, block, activation

    def __call__(self, x: Tensor) -> Tensor:
        block = self._block
        if not self._owner.on:
            output: Tensor = type(block).forward(block, x)
            return output
        apply: Callable[..., Tensor] = _Gated.apply
        hidden: Tensor = block.down_proj(apply(block.gate_proj(x), block.up_proj(x), self._activation))
        return hidden


class _FusedRotary:
    """A family's function that rotates queries and keys."""

    def __init__(self, owner: FusedModules, own: Callable[..., Any]) -> None:
        self._owner, self._own = owner, own

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        whole = cos.dim() == 3 and cos.shape[-1] == q.shape[-1] and q.dtype == cos.dtype
        if not self._owner.on or not whole or others or options.get("unsqueeze_dim", 1) != 1:
            turned: tuple[Tensor, Tensor] = self._own(q, k, cos, sin, *others, **options)
            return turned
        apply: Callable[..., tuple[Tensor, Tensor]] = _Rotary.apply
        return apply(q, k, cos, sin)


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def norm_form(kind: Any) -> NormForm | None:
    """The form of the RMS norm that `kind` computes, found by computing one in bf16; None if it computes none."""
    return _asked_form(kind) if "RMSNorm" in kind.__name__ else None


@lru_cache(maxsize=256)
def _asked_form(kind: Any) -> NormForm | None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, ASKED_SIZE, generator=random, device="cpu").bfloat16()
    weight_H = torch.randn(ASKED_SIZE, generator=random, device="cpu").bfloat16()
    try:
        with torch.device("cpu"), torch.no_grad():
            asked = kind(ASKED_SIZE, eps=ASKED_EPS)
            asked.weight = nn.Parameter(weight_H)
            _eps(asked)
            answer = asked(x)
    except (TypeError, AttributeError, RuntimeError):  # it is made, or called, in another way
        return None
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + ASKED_EPS)
    forms = {
        NormForm(0.0, "llama"): weight_H * normed.bfloat16(),
        NormForm(0.0, "gemma"): (weight_H.float() * normed).bfloat16(),
        NormForm(1.0, "gemma"): ((1.0 + weight_H.float()) * normed).bfloat16(),
    }
    return next((form for form, output in forms.items() if torch.equal(output, answer)), None)


def gated_activation(block: nn.Module) -> str | None:
    """ "silu" or "gelu" (its tanh approximation) if `block` computes down(act(gate(x)) · up(x)), found by running its
    own forward method with small linear layers; else None."""
    if not all(hasattr(block, name) for name in (*LINEARS, "act_fn")):
        return None
    kind: Any = type(block)
    return _asked_activation(kind, block.act_fn)


@lru_cache(maxsize=256)
def _asked_activation(kind: Any, act_fn: Any) -> str | None:
    random = torch.Generator().manual_seed(0)
    asked = kind.__new__(kind)
    nn.Module.__init__(asked)
    with torch.device("cpu"), torch.no_grad():
        for name, shape in zip(LINEARS, ((8, 6), (8, 6), (6, 8)), strict=True):
            linear = nn.Linear(shape[1], shape[0], bias=False)
            linear.weight.copy_(torch.randn(shape, generator=random))
            setattr(asked, name, linear)
        asked.act_fn = act_fn
        x = torch.randn(1, 5, 6, generator=random)
        try:
            answer = kind.forward(asked, x)
        except (TypeError, AttributeError, RuntimeError):  # it needs something else
            return None
        gate, up = asked.gate_proj(x), asked.up_proj(x)
        known = {"silu": nn.functional.silu(gate), "gelu": nn.functional.gelu(gate, approximate="tanh")}
        outputs = {name: asked.down_proj(value * up) for name, value in known.items()}
    if not isinstance(answer, Tensor):
        return None
    return next((name for name, output in outputs.items() if torch.allclose(output, answer, atol=1e-6)), None)


@lru_cache(maxsize=256)
def rotates_by_halves(function: Callable[..., Any]) -> bool:
    """Whether `function` computes q · cos + rotate_half(q) · sin, and the same of k."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 8, generator=random, device="cpu") for heads in (2, 1))
    angles = torch.randn(2, 3, 4, generator=random, device="cpu").repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        answers = function(q, k, cos, sin)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    return all(torch.allclose(got, _rotated(x, *tables), atol=1e-6) for got, x in zip(answers, (q, k), strict=True))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
