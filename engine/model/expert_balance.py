"""Routing of a mixture of experts: the auxiliary load-balancing loss, and counts of the routers' choices. The loss is

    Σ_rows tokens_row · mean_layers( E · Σ_i f_i P_i ) / Σ_rows tokens_row

over the rows of the whole step, on all ranks, without padding: f_i is the number of a row's choices of expert i per
token (they sum to k), P_i the mean probability the router gives it. Balanced experts score k. Each row and layer has
its own product, so any split into micro-batches gives the same gradient.

Shapes: B rows, S positions, E experts, L layers with experts; k experts are chosen for each token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from engine.config.schema.recipe import Recipe
from engine.errors import UsageError
from engine.model.adapters import expert_blocks, router_parameters
from engine.model.loaded import LoadedModel

TOP_K_FAMILIES = frozenset(
    {"flex_olmo", "gpt_oss", "minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"}
)
"""Model types whose routers choose the k experts of highest probability, and return their logits."""


class Routing(NamedTuple):
    auxiliary: Tensor | None
    """Σ over rows of tokens · mean over layers of E · Σ_i f_i P_i, an fp32 scalar; None if its weight is 0."""
    choices_LE: Tensor | None
    """How many tokens chose each expert of each layer: int64 [L, E]; None unless `moe.watch_experts` is set."""


@dataclass(frozen=True)
class ExpertBalance:
    """Computes the auxiliary loss and the counts of choices from the router logits of a model in training."""

    layers: tuple[int, ...]
    """Numbers of the layers with experts, from 0, in the order of the model."""
    experts: int
    per_token: int
    weight: float
    """Factor of the auxiliary loss in what the step minimises; 0 if it is not computed."""
    watched: bool

    def no_choices(self) -> NDArray[np.int64]:
        """int64 [L, E]: the counts of a rank that ran no micro-batch."""
        return np.zeros((len(self.layers), self.experts), np.int64)

    def routing(self, logits: Sequence[Tensor], row_tokens_B: Tensor, positions: int) -> Routing:
        """`logits`: a tensor [B·S, E] for each layer; `row_tokens_B`: the tokens of each row, without its padding."""
        with torch.autocast(row_tokens_B.device.type, enabled=False):
            real_BS = torch.arange(positions, device=row_tokens_B.device) < row_tokens_B[:, None]
            terms = [self._layer(layer_logits, row_tokens_B, real_BS) for layer_logits in logits]
        products = [product for product, _ in terms if product is not None]
        return Routing(
            auxiliary=torch.stack(products).mean() if products else None,
            choices_LE=torch.stack([choices_E for _, choices_E in terms]).long() if self.watched else None,
        )

    def _layer(self, logits: Tensor, row_tokens_B: Tensor, real_BS: Tensor) -> tuple[Tensor | None, Tensor]:
        """(auxiliary term, choices of each expert [E]) of one layer; the term is None if the auxiliary loss has weight
        0. `real_BS` is False at padding."""
        real_BS1 = real_BS.unsqueeze(2).float()
        given = logits if self.weight else logits.detach()
        probabilities_BSE = torch.softmax(given.float(), -1).unflatten(0, real_BS.shape)
        with torch.no_grad():
            chosen_BSK = probabilities_BSE.topk(self.per_token).indices
            choices_BE = torch.zeros_like(probabilities_BSE).scatter_(2, chosen_BSK, 1.0).mul_(real_BS1).sum(1)
        if not self.weight:
            return None, choices_BE.sum(0)
        sums_BE = (probabilities_BSE * real_BS1).sum(1)
        products_B = (choices_BE * sums_BE).sum(1) / row_tokens_B.clamp(min=1)
        return self.experts * products_B.sum(), choices_BE.sum(0)


def expert_balance(recipe: Recipe, loaded: LoadedModel) -> ExpertBalance | None:
    """What computes the auxiliary loss and counts of the [moe] table; None if neither is asked for or applies.

    The weight defaults to the model's `router_aux_loss_coef` if its routers are trained, else 0. A notice is added for
    keys without effect on this model, and for an auxiliary loss while no router is trained. UsageError:
    `moe.aux_loss_weight` is set for a family whose routers choose experts by another rule.
    """
    blocks, wanted = expert_blocks(loaded.base), recipe.moe.aux_loss_weight
    family = str(loaded.config.model_type)
    if not blocks:
        if wanted:
            loaded.notices.append(f"moe.aux_loss_weight = {wanted} has no effect: {family} has no experts")
        return None
    if family not in TOP_K_FAMILIES:
        _refuse(family, wanted)
        if recipe.moe.watch_experts:
            loaded.notices.append(f"expert utilisation is not measured: {family} has its own rule to choose experts")
        return None
    learns = routers_learn(loaded.base)
    if wanted and not learns:
        loaded.notices.append(
            f"moe.aux_loss_weight = {wanted}, but no router is trained: it only affects the layers before the "
            "routers. Set moe.freeze_router = false to train them, or moe.aux_loss_weight = 0"
        )
    default = float(loaded.config.router_aux_loss_coef) if learns else 0.0
    weight = default if wanted is None else wanted
    if not weight and not recipe.moe.watch_experts:
        return None
    layers = tuple(int(re.findall(r"\.layers\.(\d+)\.", name + ".")[-1]) for name in blocks)
    count = getattr(loaded.config, "num_experts", None) or loaded.config.num_local_experts
    return ExpertBalance(layers, int(count), int(loaded.config.num_experts_per_tok), weight, recipe.moe.watch_experts)


def routers_learn(model: PreTrainedModel) -> bool:
    names = set(router_parameters(model))
    return any(parameter.requires_grad for name, parameter in model.named_parameters() if name in names)


def _refuse(family: str, weight: float | None) -> None:
    if weight:
        raise UsageError(
            f"moe.aux_loss_weight = {weight}, but {family} does not choose the experts of highest probability, so its "
            "balance has another formula",
            expected="one of " + ", ".join(sorted(TOP_K_FAMILIES)),
            fix="set moe.aux_loss_weight = 0",
        )
