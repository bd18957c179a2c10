"""Bytes of the scratch in which weights that are trained in bf16 are updated in fp32, a piece at a time.

The scratch is what `engine.train.step.piecewise_update` allocates for an optimizer step: for each element of a piece
the weight and its gradient in fp32, a hash where random bits are drawn, and an fp32 copy of optimizer state that is
kept in bf16. A piece is at most PIECE_ELEMENTS, but for adafactor the largest weight.

Try: `pytest tests/budget/test_rounding.py`
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from engine.budget.architecture.facts import Architecture
from engine.budget.blocks import BLOCK_BYTES, round_to_blocks
from engine.budget.predict.parallel_layout import ParallelLayout, static_of_a_rank
from engine.budget.predict.static import trained_shapes
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.operations import FLOAT

PIECE_ELEMENTS = 16 * 2**20
"""Elements that are updated at once: 64 MiB for each row of scratch. An H100 takes about 0.2 ms for their 34 bytes each
(3.35 TB/s, datasheet), which is about what the launches of a piece take on the host."""


@lru_cache(maxsize=256)
def update_scratch(arch: Architecture, config: MemoryConfig, layout: ParallelLayout) -> int:
    """Bytes of scratch of one rank in the optimizer's step; 0 if nothing is updated in scratch."""
    if config.optimizer == "adafactor":
        widened = [prod(shape) for shape, dtype in trained_shapes(arch, config) if config.updates_in_scratch(dtype)]
        piece_bytes = max((round_to_blocks(FLOAT * elements) for elements in widened), default=0)
    else:
        piece_bytes = min(FLOAT * PIECE_ELEMENTS, static_of_a_rank(arch, config, layout).widened)
    return _rows(config) * piece_bytes + BLOCK_BYTES if piece_bytes else 0


def _rows(config: MemoryConfig) -> int:
    """Number of fp32 values in scratch per element of a piece."""
    momenta = {"adamw": 2, "sgd": int(config.momentum)}.get(config.optimizer, 0)
    narrow = momenta if config.state_dtype == "bfloat16" else 0
    return 2 + narrow + int(narrow > 0 or config.rounding == "stochastic")
