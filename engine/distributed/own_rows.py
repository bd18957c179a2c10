"""Which rows of a sharded weight a rank holds.

Try: `pytest tests/distributed/test_sharded_runs.py`
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor


def own_rows(whole: DTensor) -> slice:
    """The rows (first dimension) of the whole tensor that this rank's shard holds; empty if there are fewer rows than
    ranks. torch gives each rank as many rows, the last ones fewer or none."""
    first, length = 0, len(whole)
    for dimension, placement in enumerate(whole.placements):
        if placement.is_shard():
            most = -(-len(whole) // whole.device_mesh.size(dimension))
            first = min(most * whole.device_mesh.get_local_rank(dimension), len(whole))
            length = min(most, len(whole) - first)
    return slice(first, first + length)
