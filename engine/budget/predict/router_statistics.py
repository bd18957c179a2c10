"""Bytes of the router logits that a mixture of experts keeps in training, to count how often each expert is chosen and
to compute the auxiliary loss, and of what is computed from them.

The logits of every layer are kept until all layers are done. Then each layer's become fp32 probabilities, which only
the auxiliary loss saves for backward: 2 + 4 bytes per token, expert and layer in bf16. Before any layer runs backward,
the probabilities become gradients of the logits.

Try: `python -m pytest tests/budget/test_router_statistics.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.trace.layer_kinds import layer_stack
from engine.budget.trace.memory_config import DTYPE_BYTES, MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.budget.trace.polynomial import TOKEN, BytesPolynomial

ROUTER_WEIGHTS = frozenset({"mlp.gate.weight", "mlp.router.weight"})
"""Names of router weights, below a layer."""


@dataclass(frozen=True)
class RouterStatistics:
    """Bytes that a training step keeps of a model's routers."""

    logits: tuple[int, ...]
    """Bytes per token of each layer's router logits; 0 for a layer without experts, and if the logits are neither
    counted nor used for the auxiliary loss."""
    probabilities: tuple[int, ...]
    """Bytes per token of each layer's fp32 probabilities; 0 in the same cases."""
    balances: bool
    """Whether the auxiliary loss is computed."""

    def forward(self, layer: int) -> BytesPolynomial:
        """Bytes kept while the forward pass is at `layer`: the logits of the layers before it."""
        return sum(self.logits[:layer]) * TOKEN

    def reading(self) -> BytesPolynomial:
        """Bytes in addition to the logits while the counts and the auxiliary loss are computed from them."""
        largest = max(self.probabilities)
        return (sum(self.probabilities) + largest if self.balances else 2 * largest) * TOKEN

    def loss(self) -> BytesPolynomial:
        """Bytes kept while the loss is computed: the probabilities of all layers, or 0 without the auxiliary loss."""
        return (sum(self.probabilities) if self.balances else 0) * TOKEN

    def backward(self, layer: int) -> BytesPolynomial:
        """Bytes of the logits' gradients that are live during the backward pass of `layer`: those of this layer and of
        the layers before it."""
        return (sum(self.logits[: layer + 1]) if self.balances else 0) * TOKEN


@lru_cache(maxsize=256)
def router_statistics(arch: Architecture, config: MemoryConfig) -> RouterStatistics:
    """The `RouterStatistics` of a training step of this model."""
    kinds = [kind.trainable for kind in layer_stack(arch, config).layers]
    learns = any(not ROUTER_WEIGHTS.isdisjoint(kind.trained) for kind in kinds)
    balances = learns if config.balances_experts is None else config.balances_experts
    read = [arch.experts is not None and not kind.dense and (balances or config.watches_experts) for kind in kinds]
    count = arch.experts.count if arch.experts is not None else 0
    width = DTYPE_BYTES["float16"] if config.autocast else config.base_bytes
    return RouterStatistics(
        tuple([count * width * each for each in read]), tuple([count * FLOAT * each for each in read]), balances
    )
