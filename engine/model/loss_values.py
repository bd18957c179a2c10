"""What a loss returns for a micro-batch, and the weights that an objective gives its sequences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MicroBatchLoss(NamedTuple):
    """The losses of one micro-batch and its counts of expert choices."""

    token_losses: Tensor
    """Sum of the token losses, an fp32 scalar."""
    auxiliary: Tensor | None = None
    """The auxiliary loss of a mixture of experts, an fp32 scalar (`Routing.auxiliary`); None without one."""
    choices_LE: Tensor | None = None
    """How many tokens chose each expert of each layer, int64 [L, E]; None if this is not counted."""
    metrics: Tensor | None = None
    """Sums over sequences of an objective's metrics, float64; None for the loss of tokens."""

    def share_of(self, target_tokens: int, tokens: int) -> MicroBatchLoss:
        """Divide token losses (of an objective of pairs: losses and metrics) by `target_tokens` (pairs), auxiliary loss
        by `tokens`, all of the whole step on all ranks."""
        auxiliary = None if self.auxiliary is None else self.auxiliary / tokens
        metrics = None if self.metrics is None else self.metrics / target_tokens
        return self._replace(token_losses=self.token_losses / target_tokens, auxiliary=auxiliary, metrics=metrics)

    def detached(self) -> MicroBatchLoss:
        auxiliary = None if self.auxiliary is None else self.auxiliary.detach()
        return self._replace(token_losses=self.token_losses.detach(), auxiliary=auxiliary)

    def add_(self, other: MicroBatchLoss) -> MicroBatchLoss:
        for mine, its in zip(self, other, strict=True):
            if mine is not None and its is not None:
                mine.add_(its)
        return self


class WeightedSequences(NamedTuple):
    """What an objective of whole sequences says of a micro-batch."""

    weights_B: Tensor
    """Derivative of the loss by each row's log-probability."""
    loss: Tensor
    """The micro-batch's share of the summed loss, a scalar."""
    metrics: Tensor
    """Sums over its rows."""
