"""From hidden states to logits: the output head of a model, and what its family does to the logits afterwards.

Facts only: which module is the head, by what the logits are scaled, where they are capped.

Try: `python -m pytest tests/model/test_architectures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UsageError

MULTIPLIED_BY = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""Model type = the config key its logits are multiplied by (transformers 5.23, modeling_*.py, forward)."""
DIVIDED_BY = {
    "granite": "logits_scaling",
    "granite_swa": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoe_swa": "logits_scaling",
    "granitemoeshared": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "minicpm3": "logits_scaling",
}
"""Model type = the config key its logits are divided by."""


@dataclass(frozen=True)
class Head:
    """logits = softcap(project(hidden · scale)). The scale is folded into the hidden states: H numbers, not V."""

    project: nn.Module
    scale: float
    softcap: float | None

    @property
    def linear(self) -> nn.Linear | None:
        """The module where it is a plain linear layer; None with an adapter, quantisation or another wrapper on it."""
        return self.project if type(self.project) is nn.Linear else None

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        inner: Any = getattr(self.project, "base_layer", None) or getattr(self.project, "original_module", self.project)
        return int(inner.out_features)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in fp32."""
        logits_NV: Tensor = self.project(hidden_NH * self.scale if self.scale != 1.0 else hidden_NH).float()
        return logits_NV if self.softcap is None else (logits_NV / self.softcap).tanh() * self.softcap


def find_head(model: PreTrainedModel) -> Head:
    """The head of a transformers model, adapters in place.

    Raises:
        UsageError: the model names no output embeddings.
    """
    project = model.get_output_embeddings()
    if project is None:
        raise UsageError(
            f"{type(model).__name__} does not say which module makes its logits", fix="choose another model.id"
        )
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(project, _scale(config), float(cap) if cap else None)


def _scale(config: PreTrainedConfig) -> float:
    if config.model_type in MULTIPLIED_BY:
        return float(getattr(config, MULTIPLIED_BY[config.model_type]))
    if config.model_type in DIVIDED_BY:
        return 1.0 / float(getattr(config, DIVIDED_BY[config.model_type]))
    return 1.0
