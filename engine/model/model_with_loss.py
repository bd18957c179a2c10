"""A model with its loss as one module, so that whatever gathers weights around a module's forward covers both.

The output head is a module of its own in it, whose forward computes token losses. Used where weights are spread over
ranks. Try: `pytest tests/distributed/test_sharded_model.py`
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from engine.data.batch import Batch
from engine.model.loss import LossFunction


class HeadWithLoss(nn.Module):
    """The output head: its weights are there while token losses are computed from hidden states, whether or not the
    head's own forward is called."""

    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project
        self.loss: LossFunction | None = None

    def forward(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        """Sum of token losses."""
        assert self.loss is not None
        return self.loss.sum_of_losses(hidden_NH, targets_N)


class ModelWithLoss(nn.Module):
    """Model and head under one root. Its forward is the loss of a batch."""

    def __init__(self, model: nn.Module, head: HeadWithLoss) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.loss: LossFunction | None = None

    def use(self, loss: LossFunction) -> None:
        """From here on calls of `loss` go through this module, and its use of the head through the head's forward."""
        self.loss = self.head.loss = loss
        loss.through, loss.score = self, self.head

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch. Without any target the head is used all the same, at weight zero: a rank that left it
        out would be missed when the others gather its weights."""
        assert self.loss is not None
        if batch.target_tokens:
            return self.loss.compute(batch)
        labels_BS = batch.labels_BS.clone()
        labels_BS[0, -1] = batch.input_ids_BS[0, -1]
        return 0.0 * self.loss.compute(replace(batch, labels_BS=labels_BS, target_tokens=1))
