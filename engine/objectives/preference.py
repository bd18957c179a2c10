"""Preference losses (DPO, IPO, SimPO, ORPO): from the log-probabilities of pairs of answers to the loss of each pair,
the derivative by each log-probability, and the metrics.

All are sums over pairs, so any split of a step into micro-batches gives the same gradient. They are computed in
float64: log-probabilities of long answers are large, and their differences small. Shapes: P pairs, S = 2·P sequences,
of which 2·p is the chosen and 2·p + 1 the rejected answer of pair p, M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.config.schema.preference import Preference

METRICS = (
    "rewards_chosen",
    "rewards_rejected",
    "rewards_margin",
    "rewards_accuracy",
    "logps_chosen",
    "logps_rejected",
)
"""Fields of step and eval events, each a mean over pairs."""


ROUNDING = 1e-6
"""Relative error of a log-probability that is summed from fp32 losses of tokens."""


WIN_RATE = "win_rate"
"""Share of held-out pairs whose chosen answer is likelier than the rejected one."""


class Pairs(NamedTuple):
    """Log-probabilities of answers, float64 [P]; means over an answer's tokens where the loss is `by_length`. The
    reference's are 0 for a loss without one."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """By how much more than the reference the policy prefers the chosen answer."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


class SequenceLoss(NamedTuple):
    """What an objective makes of S sequences; pairs are counted at their chosen sequence."""

    losses_S: Tensor
    weights_S: Tensor
    """Derivative of the summed loss by each sequence's log-probability."""
    metrics_SM: Tensor


def dpo(pairs: Pairs, asked: Preference) -> Tensor:
    """The DPO loss: -log σ(β·margin), with label smoothing ε the mean over both orders of the pair (Rafailov et al.
    2023, eq. 7; conservative DPO: Mitchell 2023)."""
    scaled, smoothing = asked.beta * pairs.margin, asked.label_smoothing
    return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)


def ipo(pairs: Pairs, asked: Preference) -> Tensor:
    """(margin - 1/(2β))² (Azar et al. 2023, eq. 17), of means over tokens as its authors have it in experiments."""
    return (pairs.margin - 1 / (2 * asked.beta)) ** 2


def simpo(pairs: Pairs, asked: Preference) -> Tensor:
    """-log σ(β·margin - γ), of means over tokens and without a reference (Meng et al. 2024, eq. 6)."""
    return -logsigmoid(asked.beta * pairs.margin - asked.margin)


def orpo(pairs: Pairs, asked: Preference) -> Tensor:
    """The chosen answer's mean token loss plus β times -log σ of the log odds ratio, where an answer's likelihood is
    the geometric mean over its tokens (Hong et al. 2024, eq. 3 to 6)."""
    odds = (pairs.chosen - _log1mexp(pairs.chosen)) - (pairs.rejected - _log1mexp(pairs.rejected))
    return -pairs.chosen - asked.beta * logsigmoid(odds)


LOSSES: dict[str, Callable[[Pairs, Preference], Tensor]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}


def sequence_losses(
    logps_S: Tensor, reference_S: Tensor | None, tokens_S: Tensor, asked: Preference, sft_scale: float
) -> SequenceLoss:
    """`logps_S`: sums over each answer's target tokens, of which there are `tokens_S`. `sft_scale` multiplies the sum
    of token losses of chosen answers (0: no supervised term)."""
    logps_S = logps_S.detach().double().requires_grad_()
    with torch.enable_grad():
        reference_S = torch.zeros_like(logps_S) if reference_S is None else reference_S.double()
        scale_S = 1.0 / tokens_S.double() if asked.by_length else torch.ones_like(logps_S)
        policy_S, held_S = logps_S * scale_S, reference_S * scale_S
        pairs = _by_pair(policy_S, held_S)
        losses_P = LOSSES[asked.loss](pairs, asked)
        if sft_scale:
            losses_P = losses_P - sft_scale * logps_S[0::2]
        (weights_S,) = torch.autograd.grad(losses_P.sum(), logps_S)
    losses_S = torch.zeros_like(weights_S)
    losses_S[0::2] = losses_P.detach()
    metrics_SM = torch.zeros(len(losses_S), len(METRICS), dtype=torch.float64, device=losses_S.device)
    metrics_SM[0::2] = _metrics(pairs if not asked.needs_reference else _by_pair(logps_S, reference_S), logps_S, asked)
    return SequenceLoss(losses_S, weights_S, metrics_SM)


def _by_pair(policy_S: Tensor, reference_S: Tensor) -> Pairs:
    return Pairs(policy_S[0::2], policy_S[1::2], reference_S[0::2], reference_S[1::2])


def _metrics(pairs: Pairs, logps_S: Tensor, asked: Preference) -> Tensor:
    """float64 [P, M]. As in TRL, rewards beside a reference are of whole answers, whatever their length. A pair whose
    rewards are equal up to rounding counts as half right: at the start policy and reference are the same model."""
    chosen = asked.beta * (pairs.chosen - pairs.reference_chosen)
    rejected = asked.beta * (pairs.rejected - pairs.reference_rejected)
    rounding = ROUNDING * asked.beta * (pairs.chosen.abs() + pairs.rejected.abs())
    right = 0.5 + 0.5 * torch.where((chosen - rejected).abs() > rounding, (chosen - rejected).sign(), 0.0)
    found = (chosen, rejected, chosen - rejected, right, logps_S[0::2], logps_S[1::2])
    return torch.stack([each.detach() for each in found], dim=1)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation (Mächler 2012, eq. 7)."""
    x = x.clamp(max=-1e-12)
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def pair_scores(
    asked: Preference,
    policy_S: NDArray[np.float64],
    reference_S: NDArray[np.float64] | None,
    tokens_S: NDArray[np.int32],
) -> dict[str, float]:
    """Metrics of held-out pairs by name: the win rate of log-probabilities, the mean log-probabilities, and, if the
    reference is known or the loss needs none, the loss and the rewards, means over pairs."""
    pairs, chosen_tokens = max(1, len(policy_S) // 2), max(1, int(tokens_S[0::2].sum()))
    held_S = None if reference_S is None else torch.from_numpy(reference_S)
    tokens = torch.from_numpy(tokens_S.astype(np.float64))
    found = sequence_losses(torch.from_numpy(policy_S), held_S, tokens, asked, asked.sft_weight * pairs / chosen_tokens)
    means = dict(zip(METRICS, (found.metrics_SM.sum(0) / pairs).tolist(), strict=True))
    means |= {WIN_RATE: float((policy_S[0::2] > policy_S[1::2]).mean())}
    if asked.needs_reference and reference_S is None:
        return {name: means[name] for name in (WIN_RATE, "logps_chosen", "logps_rejected")}
    return {"loss": float(found.losses_S.sum()) / pairs, **means}
