"""The output head of a model, and what the model does with the hidden states before it and with the logits behind it:
the model's own code is asked, on numbers that stand in for the decoder's and the head's results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from engine.errors import UsageError
from engine.model.token_rows import HeadRows, head_rows
from engine.model.trained import decoder_of, language_model


@dataclass(frozen=True)
class OutputHead:
    """logits = softcap(project(hidden · scale)). The scale is applied to hidden states: they have fewer elements."""

    project: nn.Module
    scale: float
    softcap: float | None

    @property
    def linear(self) -> nn.Linear | None:
        """None if the head is quantised or has an adapter or another wrapper; the base's for one with trained rows."""
        base, _ = head_rows(self.project)
        return base if type(base) is nn.Linear else None

    @property
    def rows(self) -> HeadRows | None:
        """Rows of added tokens, which are trained and stand in place of the linear layer's."""
        return head_rows(self.project)[1]

    @property
    def vocabulary(self) -> int:
        return int(self._inner.out_features)

    @property
    def width(self) -> int:
        """Of the hidden states that it projects."""
        return int(self._inner.in_features)

    @property
    def _inner(self) -> Any:
        return getattr(self.project, "base_layer", None) or getattr(self.project, "original_module", self.project)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] in fp32."""
        logits_NV: Tensor = self.project(hidden_NH * self.scale if self.scale != 1.0 else hidden_NH).float()
        return logits_NV if self.softcap is None else (logits_NV / self.softcap).tanh() * self.softcap


def find_head(model: PreTrainedModel) -> OutputHead:
    """The output head of a transformers model, with its adapters. UsageError: the model names no output embeddings, or
    its logits are no scaled or capped results of the head."""
    model = language_model(model)
    project = model.get_output_embeddings()
    if project is None:
        raise UsageError(
            f"{type(model).__name__} does not declare the module that computes its logits",
            fix="choose another model.id",
        )
    head = OutputHead(project, 1.0, None)
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):  # also of a model without values
        asked = _answers(model, head)
        return head if asked is None else OutputHead(project, *_scale_and_cap(*asked, type(model).__name__))


SMALL, LARGE = 2.0**-10, 1e6
"""Numbers given in place of logits: a cap leaves the first as it is, and is what becomes of the second."""
SAME = 1e-5
"""Largest relative difference between two fp32 results that count as one."""
NOT_ASKED = (TypeError, AttributeError, RuntimeError, ValueError, LookupError)
"""What a class may raise that needs more of its decoder than hidden states. Its logits are then taken for those of the
head alone, which `engine.model.loss.verify_logits` tries."""


def _answers(model: PreTrainedModel, head: OutputHead) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run the model's own code between decoder and logits: what the head is given, as a multiple of the decoder's
    hidden states, [3, H]; the numbers returned in its place, and the logits that the model makes of them, [3, V]. None
    if the class cannot be asked."""
    seen: list[Tensor] = []

    def project(states_BSH: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(states_BSH.float())
        return given_SV[None].clone()

    hidden_SH = torch.ones(3, head.width)
    hidden_SH[:, ::2] = 2.0
    given_SV = torch.tensor([[SMALL], [1.0], [LARGE]]).expand(3, head.vocabulary)
    bodies = {id(each) for each in (model.base_model, decoder_of(model)) if each is not model}
    parts = {each: lambda *_, **__: _DecoderOutput(hidden_SH[None]) for each in bodies} | {id(head.project): project}
    try:
        with _replaced(model, parts):
            logits_SV = model.forward(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits[0]
    except NOT_ASKED:
        return None
    if len(seen) != 1 or seen[0].shape != (1, *hidden_SH.shape):
        return None
    return seen[0][0] / hidden_SH, given_SV, logits_SV.float()


def _scale_and_cap(ratio_SH: Tensor, given_SV: Tensor, logits_SV: Tensor, name: str) -> tuple[float, float | None]:
    before = float(ratio_SH[0, 0])
    if not torch.allclose(ratio_SH, ratio_SH.new_tensor(before), rtol=SAME, atol=0.0):
        raise _strange(name, "computes its logits from other states than those of its decoder")
    if logits_SV.shape != given_SV.shape:
        raise _strange(name, f"has logits of {logits_SV.shape[-1]} tokens, and a head of {given_SV.shape[-1]}")
    behind = float(logits_SV[0, 0]) / SMALL
    most = float(logits_SV[2, 0])
    cap = most if abs(most) < LARGE * abs(behind) / 2 else None
    scaled_SV = given_SV * behind
    expected_SV = scaled_SV if cap is None else (scaled_SV / cap).tanh() * cap
    if not torch.allclose(logits_SV, expected_SV, rtol=SAME, atol=0.0):
        raise _strange(name, "changes its logits after the head by more than a factor or a cap")
    return before * behind, cap


def _strange(name: str, found: str) -> UsageError:
    return UsageError(
        f"{name} {found}",
        expected="a model whose logits are the output of its head, scaled or capped",
        fix="choose another model.id",
    )


class _DecoderOutput:
    """Stands in for what a decoder returns: its hidden states, and None for all else."""

    def __init__(self, hidden_BSH: Tensor) -> None:
        self.last_hidden_state = hidden_BSH

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else None


class _StandIn(nn.Module):
    """A module that calls a function in place of another one, which answers for everything else."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.__dict__["_module"], self.__dict__["_function"] = module, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_function"](*args, **kwargs)


@contextmanager
def _replaced(model: nn.Module, functions: dict[int, Any]) -> Iterator[None]:
    """Inside the block, modules of `model` are replaced by functions, given by the id of the module: none of their own
    code runs, and no hook."""
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent._modules.items())
        if child is not None and id(child) in functions
    ]
    for parent, name, child in places:
        parent._modules[name] = _StandIn(child, functions[id(child)])
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child
