"""The schema of preference learning: the table [preference], and the learning rates that each objective starts with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config.schema.base import NonNegative, Positive, Table

LEARNING_RATES = {("sft", "lora"): 2e-4, ("sft", "full"): 2e-5, ("dpo", "lora"): 5e-6, ("dpo", "full"): 1e-6}
"""The default of train.learning_rate for each method.objective and method.kind. A rate that suits adapters destroys
what full weights know: published full fine-tunings take 1e-5 to 5e-5. Preferences take far less: TRL's DPO 1e-6."""


class Preference(Table):
    """Settings of preference training (method.objective = "dpo")."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo: arXiv:2305.18290; ipo: arXiv:2310.12036; simpo: arXiv:2405.14734; orpo: arXiv:2403.07691; kto, for single
    answers labelled desirable or not: arXiv:2402.01306. simpo and orpo need no reference."""
    beta: Positive = 0.1
    """How strongly the policy is kept close to the reference. ipo: the regularisation tau. simpo: the scale of the
    rewards, 2.0 to 10 in its paper. orpo: the weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """dpo: the assumed fraction of pairs with swapped labels (conservative DPO)."""
    margin: NonNegative = 0.5
    """simpo: target margin between the rewards of the chosen and the rejected answer (gamma)."""
    desirable_weight: Positive = 1.0
    """kto: weight of the loss of desirable answers."""
    undesirable_weight: Positive = 1.0
    """kto: weight of the loss of undesirable answers."""
    sft_weight: NonNegative = 0.0
    """Weight of a supervised term in addition to the preference loss: the mean loss of the target tokens of chosen
    (kto: desirable) answers."""
    length_normalised: bool | None = None
    """Divide each answer's log-probability by its number of tokens. By default true for ipo, simpo and orpo."""
    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"
    """The reference model of dpo, ipo and kto. adapter_off: this model without its adapter. precomputed: this model at
    the start of the run; its log-probabilities are computed once, before step 1, and kept in the run's folder. auto:
    adapter_off for a new adapter, else precomputed."""

    @property
    def needs_reference(self) -> bool:
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def in_pairs(self) -> bool:
        """Whether the loss is of pairs of a chosen and a rejected answer, not of single answers."""
        return self.loss != "kto"

    @property
    def by_length(self) -> bool:
        """Whether log-probabilities are means over an answer's tokens."""
        return self.loss in ("ipo", "simpo", "orpo") if self.length_normalised is None else self.length_normalised
