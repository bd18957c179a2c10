"""The loss of a micro-batch: the sum of its token losses, without a tensor of tokens × vocabulary (except in "plain");
and a module of model and loss for sharded runs.

Implementations, equal up to rounding: plain (the reference); chunked, on any device, with soft-caps, smoothing and
adapters on the head; liger: the same chunks by Liger's kernel, on CUDA for a plain linear head; torch: torch's chunked
`linear_cross_entropy` (torch 2.13) for a plain linear head without soft-cap and smoothing. Shapes: B rows, S tokens, H
hidden, V vocabulary, N tokens with a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.budget.trace.memory_config import chunk_tokens as default_chunk_tokens
from engine.config.schema.recipe import Recipe
from engine.data.batch import Batch
from engine.data.tokens import IGNORED
from engine.device.base import Device
from engine.errors import UsageError
from engine.model.chunked import (
    LossSettings,
    chunked_loss,
    chunked_token_losses,
    liger_applies,
    token_losses,
    torch_loss,
    torch_obstacle,
    weighted_sum,
)
from engine.model.decoder import autocast, decoder_output
from engine.model.expert_balance import ExpertBalance, Routing, expert_balance
from engine.model.head import OutputHead, find_head
from engine.model.loaded import LoadedModel
from engine.model.loss_values import MicroBatchLoss, WeightedSequences
from engine.model.offload import ActivationOffload
from engine.model.verify import verify_logits

LossChoice = Literal["auto", "plain", "chunked", "fused"]

CHUNKED = ("chunked", "liger", "torch")
"""Implementations whose chunks have a size that can be set."""


def _weigh_nothing(_batch: Batch, logps_B: Tensor) -> WeightedSequences:
    zero = logps_B.new_zeros(())
    return WeightedSequences(torch.zeros_like(logps_B), zero, zero)


NOT_ROUTED = Routing(None, None)


class LossFunction:
    """`loss(batch)` is the sum of token losses, an fp32 scalar; 0, with zero gradients, for a batch without targets."""

    def __init__(
        self, loaded: LoadedModel, head: OutputHead, implementation: str, label_smoothing: float, chunk_tokens: int
    ) -> None:
        self.loaded = loaded
        self.head = head
        self.implementation = implementation
        self.label_smoothing = label_smoothing
        self.chunk_tokens = chunk_tokens
        """Tokens whose logits exist at once, except in "plain"; see `set_chunks`."""
        self.offload = ActivationOffload(loaded)
        self.balance: ExpertBalance | None = None
        """Only in training; None if neither auxiliary loss nor counts are wanted."""
        self.forward: Callable[[Batch], MicroBatchLoss] = self.compute
        """Computes `terms(batch)`: `compute`, or if weights are sharded, a module that gathers them and runs it."""
        self.with_model: Callable[[Callable[[], Any]], Any] = lambda compute: compute()
        """Calls what runs the decoder; if weights are sharded, inside the forward of the module that gathers them."""
        self.with_head: Callable[[Tensor, Callable[[Tensor], Any]], Any] = lambda hidden_NH, compute: compute(hidden_NH)
        """Calls `compute(hidden_NH)`; if weights are sharded, inside a module that gathers the head's."""
        self.weigh: Callable[[Batch, Tensor], WeightedSequences] | None = None
        """In training on an objective of whole sequences: weighs a micro-batch by its rows' log-probabilities."""
        self.ranks_per_row = 1
        """Ranks that each have a part of every row's tokens, inside `on_slices`."""
        self._sum_over_parts: Callable[[Tensor], None] = lambda sums_B: None

    @property
    def implementation(self) -> str:
        """One of "plain", "chunked", "liger", "torch". `set_chunks(None)` returns to the one assigned last."""
        return self._in_use

    @implementation.setter
    def implementation(self, name: str) -> None:
        self._in_use = self._chosen = name

    @property
    def chunks(self) -> int | None:
        """Tokens whose logits exist at once; None in "plain" (all)."""
        return self.chunk_tokens if self.implementation in CHUNKED else None

    @contextmanager
    def weighing_nothing(self) -> Iterator[None]:
        """Inside the block an objective of whole sequences weighs every row 0. Ranks that share rows exchange what they
        exchange otherwise."""
        weigh = self.weigh
        self.weigh = None if weigh is None else _weigh_nothing
        try:
            yield
        finally:
            self.weigh = weigh

    @contextmanager
    def on_slices(self, ranks: int, sum_over_parts: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside the block, batches are slices of rows that `ranks` share; `sum_over_parts` sums in place, over these
        ranks, what is known of each row."""
        before = self.ranks_per_row, self._sum_over_parts
        self.ranks_per_row, self._sum_over_parts = ranks, sum_over_parts
        try:
            yield
        finally:
            self.ranks_per_row, self._sum_over_parts = before

    def set_chunks(self, tokens: int | None) -> None:
        """Compute the loss for `tokens` tokens at a time; "plain" gives way to "chunked" until called with None."""
        if tokens is not None:
            self.chunk_tokens = tokens
        self._in_use = "chunked" if tokens is not None and self._chosen not in CHUNKED else self._chosen

    def __call__(self, batch: Batch) -> Tensor:
        """The caller divides this by the target tokens of the whole step before backward."""
        return self.terms(batch).token_losses

    def terms(self, batch: Batch) -> MicroBatchLoss:
        """Token losses, auxiliary loss and counts; for the latter, in training, `batch.row_tokens_B` must be set."""
        return self.forward(batch)

    def minimised(self, share: MicroBatchLoss) -> Tensor:
        """The scalar for backward: token losses plus weighted auxiliary loss, of what `share_of` returned."""
        if share.auxiliary is None or self.balance is None:
            return share.token_losses
        return share.token_losses + self.balance.weight * share.auxiliary

    def compute(self, batch: Batch) -> MicroBatchLoss:
        """As `terms`, which gathers sharded weights first: here they must be gathered."""
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
            if self.weigh is not None and self.loaded.model.training:
                compute = partial(self._of_sequences, self.weigh, targets_N, batch)
                value, metrics = self.with_head(hidden_NH, compute)
                return MicroBatchLoss(value, *routing, metrics=metrics)
            if targets_N.numel() == 0:
                return MicroBatchLoss(hidden_NH.float().sum(), *routing)
            return MicroBatchLoss(self.with_head(hidden_NH, partial(self.sum_of_losses, targets_N)), *routing)

    def _of_sequences(
        self,
        weigh: Callable[[Batch, Tensor], WeightedSequences],
        targets_N: Tensor,
        batch: Batch,
        hidden_NH: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(loss, metrics) of an objective of whole sequences. Its gradient is that of the rows' log-probabilities, each
        times a weight: so the decoder runs once, and the head once more to find the weights."""
        rows_N = _rows_of_targets(batch)
        found = weigh(batch, self._log_probabilities(targets_N, rows_N, batch, hidden_NH))
        weights_N = found.weights_B.neg().float().index_select(0, rows_N)
        del rows_N
        weighted = self.sum_of_losses(targets_N, hidden_NH, weights_N) if len(targets_N) else hidden_NH.float().sum()
        value = weighted - weighted.detach() + found.loss.float() / self.ranks_per_row
        return value, found.metrics / self.ranks_per_row

    @torch.no_grad()
    def log_probabilities(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """Sum of the log-probabilities of each row's target tokens, float64 [B], without gradients. If `adapter` is
        false, those of the model without it."""

        def compute() -> Tensor:
            hidden_BSH, _ = decoder_output(self.loaded, batch)
            hidden_NH, targets_N = self._at_targets(hidden_BSH, batch)
            del hidden_BSH
            found: Tensor = self.with_head(
                hidden_NH, partial(self._log_probabilities, targets_N, _rows_of_targets(batch), batch)
            )
            return found

        with autocast(self.loaded), nullcontext() if adapter else self.loaded.adapter_off():
            values: Tensor = self.with_model(compute)
        return values

    def _log_probabilities(self, targets_N: Tensor, rows_N: Tensor, batch: Batch, hidden_NH: Tensor) -> Tensor:
        settings = LossSettings(0.0, self.head.softcap, self.chunk_tokens, self.implementation == "liger")
        sums_B = torch.zeros(len(batch.input_ids_BS), dtype=torch.float64, device=hidden_NH.device)
        if len(targets_N):  # a slice of rows may have none
            losses_N = chunked_token_losses(self.head, hidden_NH.detach(), targets_N, settings)
            sums_B.index_add_(0, rows_N, losses_N.double()).neg_()
        self._sum_over_parts(sums_B)
        return sums_B

    def _at_targets(self, hidden_BSH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] whose next token is a target, and these targets [N]. N was counted on the host, which
        does not wait for the device."""
        next_BS = batch.labels_BS if batch.labels_shifted else batch.labels_BS[:, 1:]
        next_T, width = next_BS.flatten(), next_BS.shape[1]
        if batch.target_tokens == len(next_T):
            return hidden_BSH[:, :width].flatten(0, 1), next_T
        index_N = torch.nonzero_static(next_T != IGNORED, size=batch.target_tokens).squeeze(1)
        # A row of hidden states has one more position than a row of next tokens, unless labels came shifted.
        position_N = index_N + index_N // max(1, width) * (hidden_BSH.shape[1] - width)
        return hidden_BSH.flatten(0, 1).index_select(0, position_N), next_T.index_select(0, index_N)

    def sum_of_losses(self, targets_N: Tensor, hidden_NH: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Sum of token losses, each times its weight (None: 1), an fp32 scalar. The head's weights must be gathered
        (`with_head` does that)."""
        # Evaluation scores the model's own probabilities, whatever training aims at.
        head, smoothing = self.head, self.label_smoothing if self.loaded.model.training else 0.0
        if self.implementation == "plain":
            return weighted_sum(token_losses(head.logits(hidden_NH), targets_N, smoothing), weights_N)
        if self.implementation == "torch":
            return torch_loss(head, hidden_NH, targets_N, self.chunk_tokens, weights_N)
        settings = LossSettings(smoothing, head.softcap, self.chunk_tokens, self.implementation == "liger")
        return chunked_loss(head, hidden_NH, targets_N, settings, weights_N)


def _rows_of_targets(batch: Batch) -> Tensor:
    """Row of each token with a target, int64 [N], in the order of `_at_targets`."""
    next_BS = batch.labels_BS if batch.labels_shifted else batch.labels_BS[:, 1:]
    return torch.nonzero_static(next_BS != IGNORED, size=batch.target_tokens)[:, 0]


def loss_of(recipe: Recipe, loaded: LoadedModel, device: Device) -> LossFunction:
    """Create the loss that a recipe's tables [train] and [moe] describe."""
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
    """Create the loss, after `verify_logits`. `chunk_tokens` defaults to what memory plans assume for this vocabulary
    and device. UsageError: "fused" was asked for, but no fused kernel can compute this loss; or the logits differ."""
    head = find_head(loaded.base)
    verify_logits(loaded, head, device)
    chosen = choose_implementation(implementation, head, label_smoothing, device)
    chunk_tokens = chunk_tokens or default_chunk_tokens(head.vocabulary, device.capacity_bytes)
    return LossFunction(loaded, head, chosen, label_smoothing, chunk_tokens)


def choose_implementation(asked: LossChoice, head: OutputHead, label_smoothing: float, device: Device) -> str:
    """One of "plain", "chunked", "liger" and "torch", for `asked`, the recipe's train.loss; "auto" is Liger's kernel
    where it applies, else "chunked". UsageError: "fused" was asked for, but no fused kernel can compute this loss."""
    if asked not in ("auto", "fused"):
        return asked
    if liger_applies(head, device):
        return "liger"
    if asked == "auto":
        return "chunked"
    obstacle = torch_obstacle(head, label_smoothing)
    if obstacle:
        raise UsageError(f'train.loss = "fused": {obstacle}', fix='set train.loss = "auto"')
    return "torch"


class HeadWithLoss(nn.Module):
    """The output head as a module whose forward computes what is asked: FSDP gathers its weights, which loss kernels
    read without calling the head."""

    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project

    def forward(self, hidden_NH: Tensor, compute: Callable[[Tensor], Any]) -> Any:
        return compute(hidden_NH)


class ModelWithLoss(nn.Module):
    def __init__(self, model: nn.Module, head: HeadWithLoss) -> None:
        super().__init__()
        self.model, self.head = model, head

    def use(self, loss: LossFunction) -> None:
        """Make `loss` run the model through the forward of this module, and the head through that of `self.head`."""
        loss.with_model, loss.with_head = self, self.head
        loss.forward = lambda batch: self(partial(_terms_with_head, loss, batch))

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


def _terms_with_head(loss: LossFunction, batch: Batch) -> MicroBatchLoss:
    """Without targets the head runs too, times 0: gathering its weights is a collective of all ranks."""
    if batch.target_tokens or loss.weigh is not None:
        return loss.compute(batch)
    labels_BS = batch.labels_BS.clone()
    labels_BS[0, -1] = batch.input_ids_BS[0, -1]
    terms = loss.compute(replace(batch, labels_BS=labels_BS, target_tokens=1))
    return terms._replace(token_losses=0.0 * terms.token_losses)
