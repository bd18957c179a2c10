"""Gradients of the auxiliary loss of mixtures: a ragged step cut into micro-batches, and a plain reference. No test
lives here."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.data.batch import Batch
from engine.model.loaded import LoadedModel
from engine.model.loss import LossFunction
from tests.model.samples import batch_of

SEQUENCES = 16


def rows_of(batch: Batch, rows: range) -> Batch:
    """The given rows of a batch as a micro-batch, cut to the longest of them."""
    assert batch.row_tokens_B is not None
    tokens_B = batch.row_tokens_B[rows.start : rows.stop]
    cut = (slice(rows.start, rows.stop), slice(0, int(tokens_B.max())))
    labels_BS = batch.labels_BS[cut]
    return replace(
        batch,
        input_ids_BS=batch.input_ids_BS[cut],
        labels_BS=labels_BS,
        attention_mask_BS=None,
        row_tokens_B=tokens_B,
        target_tokens=int((labels_BS[:, 1:] != -100).sum()),
    )


def ragged(rows: int = SEQUENCES) -> Batch:
    """A padded batch whose rows have between 12 and 5 tokens."""
    batch = batch_of(rows, masked=2)
    tokens_B = torch.tensor([12 - row % 8 for row in range(rows)])
    labels_BS = batch.labels_BS.masked_fill(torch.arange(12) >= tokens_B[:, None], -100)
    return replace(
        batch, labels_BS=labels_BS, row_tokens_B=tokens_B, target_tokens=int((labels_BS[:, 1:] != -100).sum())
    )


def gradients(loaded: LoadedModel, loss: LossFunction, batch: Batch, micro_batch: int) -> dict[str, torch.Tensor]:
    """The gradients of a step over all rows, by parameter name, computed in micro-batches of `micro_batch` rows."""
    assert batch.row_tokens_B is not None
    loaded.model.zero_grad(set_to_none=True)
    for first in range(0, SEQUENCES, micro_batch):
        terms = loss.terms(rows_of(batch, range(first, first + micro_batch)))
        loss.minimised(terms.share_of(batch.target_tokens, int(batch.row_tokens_B.sum()))).backward()
    return {name: p.grad.clone() for name, p in loaded.trainable() if p.grad is not None}


def reference(loaded: LoadedModel, batch: Batch) -> torch.Tensor:
    """The auxiliary loss of a step, computed by a plain loop over layers and sequences."""
    assert batch.row_tokens_B is not None
    total, config = torch.zeros(()), loaded.config
    for row, tokens in enumerate(batch.row_tokens_B.tolist()):
        ids = batch.input_ids_BS[row : row + 1, :tokens]
        per_layer = []
        for logits in loaded.base(input_ids=ids, output_router_logits=True).router_logits:
            probabilities = logits.float().softmax(-1)
            experts = probabilities.shape[1]
            chosen = probabilities.topk(config.num_experts_per_tok).indices
            chosen_of = torch.stack([(chosen == expert).sum() for expert in range(experts)]) / tokens
            per_layer.append(experts * (chosen_of * probabilities.mean(0)).sum())
        total = total + tokens * torch.stack(per_layer).mean()
    return total / int(batch.row_tokens_B.sum())
