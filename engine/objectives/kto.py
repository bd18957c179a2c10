"""The KTO loss of single answers that are desirable or not: from their log-probabilities to the loss of each, the
derivative by each log-probability, and the metrics.

All are sums over answers, in float64 as in `engine.objectives.preference`. Shapes: S answers, M metrics.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config.schema.preference import Preference
from engine.objectives.preference import SequenceLoss

SUMS = ("rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected")
"""What is summed over answers: the first and third over desirable ones, the others over undesirable ones."""


def kto(ratios_S: Tensor, divergence: float, desirable_S: Tensor, asked: Preference) -> Tensor:
    """weight·(1 - σ(±β·(ratio - divergence))), + for desirable answers (Ethayarajh et al. 2024, eq. 7 and 8). A ratio
    is the answer's log-probability by the policy minus that by the reference."""
    good_S = desirable_S.to(ratios_S.dtype)
    weights_S = asked.desirable_weight * good_S + asked.undesirable_weight * (1 - good_S)
    return weights_S * torch.sigmoid(asked.beta * (1 - 2 * good_S) * (ratios_S - divergence))


def divergence_of(differences: float, sequences: int) -> float:
    """The estimate of KL(policy, reference) from the sum of the differences of log-probabilities of mismatched
    sequences, at least 0. It has no gradient."""
    return max(0.0, differences / max(1, sequences))


def answer_losses(
    logps_S: Tensor,
    reference_S: Tensor,
    desirable_S: Tensor,
    divergence: float,
    asked: Preference,
    sft_scale: float,
) -> SequenceLoss:
    """`logps_S`: sums over each answer's target tokens. `sft_scale` multiplies the sum of token losses of desirable
    answers (0: no supervised term)."""
    logps_S = logps_S.detach().double().requires_grad_()
    with torch.enable_grad():
        ratios_S = logps_S - reference_S.double()
        losses_S = kto(ratios_S, divergence, desirable_S, asked) - sft_scale * logps_S * desirable_S
        (weights_S,) = torch.autograd.grad(losses_S.sum(), logps_S)
    rewards_S, held_S = asked.beta * ratios_S.detach(), logps_S.detach()
    columns = (rewards_S * desirable_S, rewards_S * ~desirable_S, held_S * desirable_S, held_S * ~desirable_S)
    return SequenceLoss(losses_S.detach(), weights_S, torch.stack(columns, dim=1))


def metrics_of(sums: list[float], desirable: int, undesirable: int, divergence: float) -> dict[str, float]:
    """By name in step and eval events, from the sums over all answers of a step: means over desirable answers, over
    undesirable ones, the difference of both rewards, and the divergence. What there are no answers for is left out."""
    counts = {"chosen": desirable, "rejected": undesirable}
    each = zip(SUMS, sums, strict=True)
    found = {name: value / counts[side] for name, value in each if counts[side := name.rpartition("_")[2]]}
    if desirable and undesirable:
        found["rewards_margin"] = found["rewards_chosen"] - found["rewards_rejected"]
    return found | {"kl": divergence}


def answer_scores(
    asked: Preference,
    policy_S: NDArray[np.float64],
    reference_S: NDArray[np.float64] | None,
    differences: float,
    desirable_S: NDArray[np.bool_],
    tokens_S: NDArray[np.int32],
) -> dict[str, float]:
    """Metrics of held-out answers by name; without a reference, the mean log-probabilities alone. `differences`: the
    sum that `divergence_of` takes, of as many mismatched sequences."""
    good, bad = int(desirable_S.sum()), int((~desirable_S).sum())
    divergence = divergence_of(differences, len(policy_S))
    held, tokens = policy_S if reference_S is None else reference_S, max(1, int(tokens_S[desirable_S].sum()))
    policy, reference, desirable = (torch.from_numpy(each) for each in (policy_S, held, desirable_S))
    sft_scale = asked.sft_weight * len(policy_S) / tokens
    found = answer_losses(policy, reference, desirable, divergence, asked, sft_scale)
    metrics = metrics_of(found.metrics_SM.sum(0).tolist(), good, bad, divergence)
    if reference_S is None:
        return {name: value for name, value in metrics.items() if name.startswith("logps_")}
    return {"loss": float(found.losses_S.mean()), **metrics}
