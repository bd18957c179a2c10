"""One layer of a vision tower, written like its modelling file; a token of the walk is a patch.

How layers follow each other is `engine.budget.vision`.

Try: `python -m pytest tests/budget/test_towers.py`
"""

from __future__ import annotations

from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.attention import attend, rotary
from engine.budget.ghost import Ghost, Walk
from engine.budget.norm import rms_norm
from engine.budget.operations import (
    FLOAT,
    activation,
    add,
    cast,
    copy,
    layer_norm,
    multiply,
    saves_output,
    scale,
    split,
)
from engine.budget.packed import TOKEN
from engine.budget.selection import Selection
from engine.budget.setting import Setting
from engine.budget.tower import Tower
from engine.budget.tower_parameters import tower_layer
from engine.budget.weights import Weights


class TowerLayer(Weights):
    """One layer, written like its modelling file; a token of the walk is a patch."""

    def __init__(self, walk: Walk, tower: Tower, setting: Setting, chosen: Selection) -> None:
        super().__init__(walk, setting, chosen, tower_layer(tower), transposed=False)
        self.tower = tower
        self.arch = attending(tower)

    def forward(self, x: Ghost) -> Ghost:
        """Two halves with their residual connections."""
        first, second = ("layer_norm1", "layer_norm2") if self.tower.kind == "siglip" else ("norm1", "norm2")
        residual = x
        hidden = self.norm(first, x)
        hidden, _weights = self.attention(hidden)
        hidden = add(self.walk, residual, hidden)
        residual = hidden
        hidden = self.norm(second, hidden)
        hidden = self.feed_forward(hidden)
        return add(self.walk, residual, hidden)

    def norm(self, name: str, x: Ghost) -> Ghost:
        """A layer norm where it has a bias, else an RMSNorm."""
        return norm_of(self, name, x)

    def attention(self, x: Ghost) -> tuple[Ghost, Ghost | None]:
        """Projections, rotary embedding in fp32, the kernel for one image after the other, the output projection."""
        walk, elements = self.walk, self.tower.hidden * TOKEN
        if self.tower.kind == "siglip":
            query = self.linear("self_attn.q_proj", x)
            key = self.linear("self_attn.k_proj", x)
            value = self.linear("self_attn.v_proj", x)
            output, weights = attend(walk, self.arch, self.setting, False, query, key, value)
            return self.linear("self_attn.out_proj", output), weights
        query, key, value = split(walk, self.linear("attn.qkv", x), [elements] * 3)
        query, key = self._turned(query, key)
        outputs, _weights = attend(walk, self.arch, self.setting, False, query, key, value)
        joined = copy(walk, outputs)
        return self.linear("attn.proj", joined), None

    def _turned(self, query: Ghost, key: Ghost) -> tuple[Ghost, Ghost]:
        """`apply_rotary_pos_emb_vision`."""
        walk, itemsize = self.walk, query.itemsize
        query, key = cast(walk, query, FLOAT), cast(walk, key, FLOAT)
        turned_query = rotary(walk, self.arch, query, FLOAT)
        turned_key = rotary(walk, self.arch, key, FLOAT)
        turned_query = cast(walk, turned_query, itemsize)
        turned_key = cast(walk, turned_key, itemsize)
        return turned_query, turned_key

    def feed_forward(self, x: Ghost) -> Ghost:
        """Gated in Qwen2.5-VL, plain in the others."""
        if self.tower.kind == "qwen2_5_vl":
            gate = activation(self.walk, self.linear("mlp.gate_proj", x))
            return self.linear("mlp.down_proj", multiply(self.walk, gate, self.linear("mlp.up_proj", x)))
        act = quick_gelu if self.tower.activation == "quick_gelu" else activation
        hidden = self.linear("mlp.fc1", x)
        hidden = act(self.walk, hidden)
        return self.linear("mlp.fc2", hidden)


def quick_gelu(walk: Walk, x: Ghost) -> Ghost:
    """`x * sigmoid(1.702 * x)`."""
    return multiply(walk, x, saves_output(walk, scale(walk, x)))


def norm_of(weights: Weights, name: str, x: Ghost) -> Ghost:
    """A norm among `weights`: a layer norm where it has a bias, else an RMSNorm."""
    size, trained = weights.weight(name)
    if f"{name}.bias" in weights.parameters:
        return layer_norm(weights.walk, x, size, trained)
    return rms_norm(weights.walk, x, TOKEN, size, trained, weights.setting.base_bytes, wide=False)


@lru_cache(maxsize=64)
def attending(tower: Tower) -> Architecture:
    """What attention asks of an architecture, with the tower's numbers."""
    return Architecture(
        model_type=tower.kind,
        layout="llama",
        vocab=0,
        hidden=tower.hidden,
        intermediate=tower.intermediate,
        layers=tower.layers,
        heads=tower.heads,
        kv_heads=tower.heads,
        head_dim=tower.hidden // tower.heads,
        tied=False,
        activation=tower.activation,
    )
