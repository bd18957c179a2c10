"""The loss of a micro-batch: the sum of its token losses, without a tensor of tokens × vocabulary (except in "plain").

The decoder computes hidden states; only those that predict a target token go through the head. Their loss has three
implementations, which give the same result up to rounding:

- plain: all logits at once; the reference.
- chunked: `engine.model.chunked`, on any device, with soft-caps, smoothing and adapters on the head.
- fused: Liger's kernel on CUDA (`engine.model.liger`), else torch's chunked `linear_cross_entropy` (torch 2.13). Both
  need a head that is a plain linear layer, Liger's a frozen one. torch's supports neither soft-cap nor smoothing.

Shapes: B rows, S tokens, H hidden, V vocabulary, N tokens with a target.

Try: `python -m pytest tests/model/test_loss.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.budget.trace.memory_config import chunk_tokens as default_chunk_tokens
from engine.data.batch import Batch
from engine.data.tokens import IGNORED
from engine.device.base import Device
from engine.errors import UsageError
from engine.model.chunked import LossSettings, chunked_loss, token_losses
from engine.model.decoder import autocast, decoder_of, decoder_output, eval_mode
from engine.model.expert_balance import ExpertBalance, Routing, expert_balance
from engine.model.head import OutputHead, find_head
from engine.model.hub import blaming_own_code
from engine.model.liger import liger_applies, liger_loss, liger_problem
from engine.model.loaded import LoadedModel
from engine.model.offload import ActivationOffload
from engine.spec.schema.recipe import Recipe

LossChoice = Literal["auto", "plain", "chunked", "fused"]

CHUNKED = ("chunked", "torch")
"""Implementations whose chunks have a size that can be set."""


class MicroBatchLoss(NamedTuple):
    """The losses of one micro-batch, which a step minimises, and its counts of expert choices."""

    token_losses: Tensor
    """Sum of the token losses, an fp32 scalar."""
    auxiliary: Tensor | None = None
    """The auxiliary loss of a mixture of experts, an fp32 scalar (`Routing.auxiliary`); None without one."""
    choices_LE: Tensor | None = None
    """How many tokens chose each expert of each layer, int64 [L, E]; None if this is not counted."""

    def share_of(self, target_tokens: int, tokens: int) -> MicroBatchLoss:
        """Return this micro-batch's share of the step's loss: the token losses divided by `target_tokens`, the
        auxiliary loss divided by `tokens`. Both are the numbers of the whole step, over all ranks."""
        auxiliary = None if self.auxiliary is None else self.auxiliary / tokens
        return self._replace(token_losses=self.token_losses / target_tokens, auxiliary=auxiliary)

    def detached(self) -> MicroBatchLoss:
        """Return the same values detached from the autograd graph."""
        auxiliary = None if self.auxiliary is None else self.auxiliary.detach()
        return self._replace(token_losses=self.token_losses.detach(), auxiliary=auxiliary)

    def add_(self, other: MicroBatchLoss) -> MicroBatchLoss:
        """Add the values of another micro-batch to this one's, in place; returns the sum."""
        for mine, its in zip(self, other, strict=True):
            if mine is not None and its is not None:
                mine.add_(its)
        return self


NOT_ROUTED = Routing(None, None)


class LossFunction:
    """The loss of a model. `loss(batch)` returns the sum of token losses, an fp32 scalar. For a batch without targets
    the sum is 0 and all gradients are zero."""

    def __init__(
        self, loaded: LoadedModel, head: OutputHead, implementation: str, label_smoothing: float, chunk_tokens: int
    ) -> None:
        self.loaded = loaded
        self.head = head
        self.implementation = implementation
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        """Tokens whose logits exist at once in "chunked" and torch's "fused"; see `set_chunks`."""
        self.offload = ActivationOffload(loaded)
        self.balance: ExpertBalance | None = None
        """Computes auxiliary loss and counts from the router logits in training; None if neither is wanted."""
        self.forward: Callable[[Batch], MicroBatchLoss] = self.compute
        """Function that computes `terms(batch)`: `compute`, or if weights are sharded, a module that gathers them and
        then runs `compute`."""
        self.head_forward: Callable[[Tensor, Tensor], Tensor] = self.sum_of_losses
        """Function that computes the sum of token losses: `sum_of_losses`, or if weights are sharded, a module that
        gathers the head's weights and then runs `sum_of_losses`."""

    @property
    def implementation(self) -> str:
        """The implementation that computes the loss now: "plain", "chunked", "liger" or "torch". Assigning to it
        replaces the one that was chosen, so that `set_chunks(None)` returns to the assigned one."""
        return self._in_use

    @implementation.setter
    def implementation(self, name: str) -> None:
        self._in_use = self._chosen = name

    @property
    def chunks(self) -> int | None:
        """The number of tokens whose logits exist at once. None in "plain", where the logits of all tokens exist at
        once, and in "liger", whose kernel chooses the number itself."""
        return self.chunk_tokens if self.implementation in CHUNKED else None

    def set_chunks(self, tokens: int | None) -> None:
        """Compute the loss for `tokens` tokens at a time from now on. An implementation without chunks ("plain",
        "liger") is replaced by "chunked" until this is called with None, which returns to the chosen implementation."""
        if tokens is not None:
            self.chunk_tokens = tokens
        self._in_use = "chunked" if tokens is not None and self._chosen not in CHUNKED else self._chosen

    def __call__(self, batch: Batch) -> Tensor:
        """Return the sum of token losses. The caller divides it by the number of target tokens in the whole step before
        calling backward."""
        return self.terms(batch).token_losses

    def terms(self, batch: Batch) -> MicroBatchLoss:
        """Compute the sum of token losses, the auxiliary loss and the counts of expert choices of a micro-batch. If the
        model is in training mode and its experts are balanced or watched, `batch.row_tokens_B` must be set."""
        return self.forward(batch)

    def minimised(self, share: MicroBatchLoss) -> Tensor:
        """Return the scalar on which a step calls backward: the token losses plus the auxiliary loss times its weight.
        `share` is the result of `share_of`."""
        if share.auxiliary is None or self.balance is None:
            return share.token_losses
        return share.token_losses + self.balance.weight * share.auxiliary

    def compute(self, batch: Batch) -> MicroBatchLoss:
        """Compute the loss of a batch. If weights are sharded, they must already be gathered: callers use `terms`,
        which gathers them first."""
        balance = self.balance if self.loaded.model.training else None
        with autocast(self.loaded), self.offload.saving():
            hidden_BSH, logits = decoder_output(self.loaded, batch, router_logits=balance is not None)
            routing = NOT_ROUTED
            if balance is not None:
                assert batch.row_tokens_B is not None
                routing = balance.routing(logits, batch.row_tokens_B, batch.input_ids_BS.shape[1])
            del logits
            hidden_NH, targets_N = self._at_targets(hidden_BSH, batch)
            del hidden_BSH
            if targets_N.numel() == 0:
                return MicroBatchLoss(hidden_NH.float().sum(), *routing)
            return MicroBatchLoss(self.head_forward(hidden_NH, targets_N), *routing)

    def _at_targets(self, hidden_BSH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hidden states [N, H] at positions whose next token is a target, and these target tokens [N].

        N was counted on the host, so the host does not wait for the device.
        """
        next_BS = batch.labels_BS if batch.labels_shifted else batch.labels_BS[:, 1:]
        next_T, width = next_BS.flatten(), next_BS.shape[1]
        if batch.target_tokens == len(next_T):
            return hidden_BSH[:, :width].flatten(0, 1), next_T
        index_N = torch.nonzero_static(next_T != IGNORED, size=batch.target_tokens).squeeze(1)
        # A row of hidden states has one more position than a row of next tokens, unless labels came shifted.
        position_N = index_N + index_N // max(1, width) * (hidden_BSH.shape[1] - width)
        return hidden_BSH.flatten(0, 1).index_select(0, position_N), next_T.index_select(0, index_N)

    def sum_of_losses(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """Compute the sum of token losses, an fp32 scalar, from the hidden states that predict target tokens. If the
        head's weights are sharded, they must already be gathered (`HeadWithLoss` does that)."""
        # Evaluation scores the model's own probabilities, whatever training aims at.
        head, smoothing = self.head, self.label_smoothing if self.loaded.model.training else 0.0
        if self.implementation == "plain":
            return token_losses(head.logits(hidden_NH), targets_N, smoothing).sum()
        if self.implementation == "liger":
            return liger_loss(head, hidden_NH, targets_N, smoothing)
        if self.implementation == "torch":
            return torch_loss(head, hidden_NH, targets_N, self.chunk_tokens)
        return chunked_loss(head, hidden_NH, targets_N, LossSettings(smoothing, head.softcap, self.chunk_tokens))


def loss_of(recipe: Recipe, loaded: LoadedModel, device: Device) -> LossFunction:
    """Create the loss that a recipe's tables [train] and [moe] describe; see `make_loss` and `expert_balance`."""
    train = recipe.train
    loss = make_loss(
        loaded,
        implementation=train.loss,
        label_smoothing=train.label_smoothing,
        chunk_tokens=None,
        device=device,
    )
    loss.offload.on = train.activation_offload and device.kind != "cpu"
    loss.balance = expert_balance(recipe, loaded)
    return loss


def make_loss(
    loaded: LoadedModel,
    *,
    implementation: LossChoice,
    label_smoothing: float,
    chunk_tokens: int | None,
    device: Device,
) -> LossFunction:
    """Create the loss of `loaded`, after checking on a few tokens that decoder and head give the model's own logits.

    By default, `chunk_tokens` is the number that memory plans assume for this vocabulary and device.

    Raises:
        UsageError: "fused" was asked for, but no fused kernel can compute this loss; or the model's own forward pass
            gives other logits than decoder and head.
    """
    head = find_head(loaded.base)
    verify_logits(loaded, head, device)
    chosen = choose_implementation(implementation, head, label_smoothing, device)
    loaded.notices += chosen.notices
    chunk_tokens = chunk_tokens or default_chunk_tokens(head.vocabulary, device.capacity_bytes)
    return LossFunction(loaded, head, chosen.name, label_smoothing, chunk_tokens)


class ChosenLoss(NamedTuple):
    """The implementation of a loss: "plain", "chunked", "liger" or "torch"."""

    name: str
    notices: list[str]
    """Why Liger's kernel is not used, although it is installed and applies."""


def choose_implementation(asked: LossChoice, head: OutputHead, label_smoothing: float, device: Device) -> ChosenLoss:
    """Choose the implementation for `asked`, the recipe's train.loss. For "auto" this is Liger's kernel where it
    applies and works, else "chunked".

    Raises:
        UsageError: "fused" was asked for, but no fused kernel can compute this loss.
    """
    if asked not in ("auto", "fused"):
        return ChosenLoss(asked, [])
    notices = []
    if liger_applies(head, device):
        assert head.linear is not None
        problem = liger_problem(device.torch_device, head.linear.weight.dtype)
        if problem is None:
            return ChosenLoss("liger", [])
        notices = [f"Liger's fused loss is not used: {problem}"]
    if asked == "auto":
        return ChosenLoss("chunked", notices)
    obstacle = _torch_obstacle(head, label_smoothing)
    if obstacle:
        raise UsageError("; ".join([f'train.loss = "fused": {obstacle}', *notices]), fix='set train.loss = "auto"')
    return ChosenLoss("torch", notices)


def verify_logits(loaded: LoadedModel, head: OutputHead, device: Device) -> None:
    """Check on four tokens that decoder and head give the same logits as the model's own forward pass.

    Raises:
        UsageError: the logits differ by more than the dtype's rounding, or are not finite.
    """
    model = loaded.base
    with eval_mode(loaded.model), autocast(loaded), blaming_own_code(model.config, str(model.name_or_path)):
        ids_BS = torch.arange(4, device=device.torch_device)[None] % head.vocabulary
        own_BSV = model(input_ids=ids_BS, use_cache=False).logits.float()
        hidden_BSH = decoder_of(model)(input_ids=ids_BS, use_cache=False).last_hidden_state
        ours_BSV = head.logits(hidden_BSH)
        error = float((own_BSV - ours_BSV).abs().max())
        size = float(own_BSV.abs().max())
    if not math.isfinite(size):
        raise UsageError(
            f"the model's own logits are not finite in {loaded.precision.compute}",
            expected="a dtype this family can be computed in",
            fix='set model.dtype to "bfloat16" or "float32"; if that changes nothing, the weights are broken',
        )
    tolerance = 1e-4 if loaded.precision.compute == torch.float32 else 4e-2
    if not error <= tolerance * max(size, 1e-3):
        raise UsageError(
            f"the logits of {model.config.model_type} are not those of its decoder and head (off by {error:.3g} "
            f"of {size:.3g}), so its loss cannot be computed in pieces",
            expected="an architecture whose logits are scale, soft-cap and head of the hidden states",
            fix="report the model id; its family needs a line in engine/model/head.py",
        )


def torch_loss(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, chunk_tokens: int) -> Tensor:
    """Compute the sum of token losses with torch's chunked linear_cross_entropy. Per-token losses are summed here in
    fp32: torch's own sum has the input's dtype and would lose all precision in bf16."""
    scaled_NH = hidden_NH * head.scale if head.scale != 1.0 else hidden_NH
    assert head.linear is not None
    bias_V: Tensor | None = head.linear.bias
    losses_N = torch.nn.functional.linear_cross_entropy(
        scaled_NH,
        head.linear.weight.to(scaled_NH.dtype),
        targets_N,
        linear_bias=None if bias_V is None else bias_V.to(scaled_NH.dtype),
        reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=min(chunk_tokens, len(targets_N)), chunking_method=None, acc_policy="accurate"
        ),
    )
    return losses_N.float().sum()


def _torch_obstacle(head: OutputHead, label_smoothing: float) -> str | None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return "torch's linear_cross_entropy came with 2.13, this is " + torch.__version__
    if head.linear is None:
        return "the head carries an adapter or is quantised, which no fused kernel handles"
    if head.softcap is not None:
        return "this model caps its logits, which torch's kernel cannot"
    if label_smoothing:
        return "with train.label_smoothing torch's kernel falls back to holding all logits"
    return None
