"""What one micro-batch adds on top of the static bytes, as functions of its shape, phase by phase.

Formulas first: BUDGET.md's closed form.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.setting import Setting
from engine.budget.static import static_bytes


class Growth(NamedTuple):
    """Bytes of a live set as a function of the micro-batch: rows × length = tokens."""

    fixed: int = 0
    token: int = 0
    """Per token of the padded micro-batch."""
    square: int = 0
    """Per row and length squared: attention scores and masks that are materialised."""
    chunk: int = 0
    """Per token of the loss chunk."""

    def at(self, rows: int, length: int, chunk_tokens: int) -> int:
        """Bytes for a micro-batch of `rows` sequences padded to `length`."""
        tokens = rows * length
        return self.fixed + tokens * (self.token + self.square * length) + min(tokens, chunk_tokens) * self.chunk


def step_growth(arch: Architecture, setting: Setting) -> dict[str, Growth]:
    """Live bytes above static per phase of forward and backward, at its peak. Source: BUDGET.md, "What a peak is made of"."""
    base, hidden, layers = setting.base_bytes, arch.hidden, arch.layers
    static = static_bytes(arch, setting)
    total, per_layer = static.total.gradients, static.layers.gradients // layers
    window = layer_window(arch, setting)
    saved = base * hidden * layers if setting.checkpointing else window * layers
    plain = setting.loss == "plain"
    head = (8 + 2 * base) * arch.vocab
    rest = static.outer.gradients
    return {
        "loss_backward": Growth(rest, saved + (base + 4) * hidden + 16 + head * plain, 0, head * (not plain)),
        "layer_first": Growth(rest, saved + (window if setting.checkpointing else 0)),
        "layer_last": Growth(rest + total - per_layer, window + base * hidden),
        "embedding_backward": Growth(total + static.embedding_gradient, base * hidden),
    }


def layer_window(arch: Architecture, setting: Setting) -> int:
    """Bytes per token while one layer is recomputed and differentiated."""
    f, h, q, k, r = arch.intermediate, arch.hidden, arch.query_width, arch.kv_width, setting.rank
    norms = (4 * q + 4 * k + 4 * (arch.heads + arch.kv_heads)) if arch.qk_norm else 0
    tail = 4 * arch.heads + 8 + norms
    if setting.lora and setting.adapter_bytes > setting.base_bytes:
        return 14 * f + 40 * h + 8 * q + 4 * k + 24 * r + tail
    scale = setting.base_bytes // 2
    if setting.lora:
        return scale * (12 * f + 14 * h + 4 * q + 4 * k + 12 * r) + tail
    return scale * (12 * f + 18 * h + 4 * q + 4 * k) + tail
