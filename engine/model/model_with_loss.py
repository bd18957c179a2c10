"""A model and its loss as one module, for runs whose weights are sharded over ranks.

FSDP gathers a module's weights while the module's forward runs. Therefore the loss is computed in the forward of
`ModelWithLoss`, and the token losses, which read the output head's weights, in the forward of `HeadWithLoss`.

Try: `pytest tests/distributed/test_sharded_model.py`
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from engine.data.batch import Batch
from engine.model.loss import LossFunction, MicroBatchLoss


class HeadWithLoss(nn.Module):
    """The output head as a module whose forward computes token losses. FSDP gathers the head's weights for this
    forward, so that loss kernels can read them without calling the head's own forward."""

    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project
        self.loss: LossFunction | None = None

    def forward(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """Compute the sum of token losses from the hidden states that predict target tokens."""
        assert self.loss is not None
        return self.loss.sum_of_losses(hidden_NH, targets_N)


class ModelWithLoss(nn.Module):
    """Model and output head as one module. Its forward returns the loss of a batch."""

    def __init__(self, model: nn.Module, head: HeadWithLoss) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.loss: LossFunction | None = None

    def use(self, loss: LossFunction) -> None:
        """Make `loss` run through the forward of this module, and compute its token losses through the forward of
        `self.head`, so that FSDP gathers their weights."""
        self.loss = self.head.loss = loss
        loss.forward, loss.head_forward = self, self.head

    def forward(self, batch: Batch) -> MicroBatchLoss:
        """Compute the loss of a batch. For a batch without targets the head runs too, and its loss is multiplied by 0:
        gathering the head's weights is a collective that every rank must join."""
        assert self.loss is not None
        if batch.target_tokens:
            return self.loss.compute(batch)
        labels_BS = batch.labels_BS.clone()
        labels_BS[0, -1] = batch.input_ids_BS[0, -1]
        terms = self.loss.compute(replace(batch, labels_BS=labels_BS, target_tokens=1))
        return terms._replace(token_losses=0.0 * terms.token_losses)
