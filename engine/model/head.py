"""The output head of a model, which turns hidden states into logits: its module, scale and soft-cap.

The losses that use it are in `engine.model.loss` and `engine.model.chunked`.

Try: `python -m pytest tests/model/test_architectures.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UsageError

LOGIT_MULTIPLIERS = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""By model type, the config key of the factor that its logits are multiplied by (transformers 5.23, modeling_*.py,
forward)."""
LOGIT_DIVISORS = {
    "granite": "logits_scaling",
    "granite_swa": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoe_swa": "logits_scaling",
    "granitemoeshared": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "minicpm3": "logits_scaling",
}
"""By model type, the config key of the number that its logits are divided by."""
SOFTCAP_KEYS = {"recurrent_gemma": "logits_soft_cap", "xlstm": "output_logit_soft_cap"}
"""By model type, the config key of the number that its logits are capped at; elsewhere final_logit_softcapping."""


@dataclass(frozen=True)
class OutputHead:
    """The output head: logits = softcap(project(hidden · scale)). The scale is applied to the hidden states, because
    they have fewer elements than the logits."""

    project: nn.Module
    scale: float
    softcap: float | None

    @property
    def linear(self) -> nn.Linear | None:
        """The head's module if it is a plain nn.Linear; None if it is quantised or has an adapter or another
        wrapper."""
        return self.project if type(self.project) is nn.Linear else None

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        inner: Any = getattr(self.project, "base_layer", None) or getattr(self.project, "original_module", self.project)
        return int(inner.out_features)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute the logits [N, V] in fp32."""
        logits_NV: Tensor = self.project(hidden_NH * self.scale if self.scale != 1.0 else hidden_NH).float()
        return logits_NV if self.softcap is None else (logits_NV / self.softcap).tanh() * self.softcap


def find_head(model: PreTrainedModel) -> OutputHead:
    """Return the output head of a transformers model, including adapters on it.

    Raises:
        UsageError: the model names no output embeddings.
    """
    project = model.get_output_embeddings()
    if project is None:
        raise UsageError(
            f"{type(model).__name__} does not name the module that computes its logits", fix="choose another model.id"
        )
    config = model.config.get_text_config()
    cap = getattr(config, SOFTCAP_KEYS.get(config.model_type, "final_logit_softcapping"), None)
    return OutputHead(project, _scale(config), float(cap) if cap else None)


def _scale(config: PreTrainedConfig) -> float:
    if config.model_type in LOGIT_MULTIPLIERS:
        return float(getattr(config, LOGIT_MULTIPLIERS[config.model_type]))
    if config.model_type in LOGIT_DIVISORS:
        return 1.0 / float(getattr(config, LOGIT_DIVISORS[config.model_type]))
    return 1.0
