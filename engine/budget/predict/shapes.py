"""Values that the prediction shares with the training step: the shape of a micro-batch, and sizes of buffers."""

from __future__ import annotations

from typing import NamedTuple

STAGE_BYTES = 32 * 2**20
"""Bytes of offloaded optimizer state copied to the device at a time: enough that PCIe bandwidth is the limit."""

PIECE_ELEMENTS = 16 * 2**20
"""Elements that are updated at once: 64 MiB for each row of scratch. An H100 takes about 0.2 ms for their 34 bytes each
(3.35 TB/s, datasheet), which is about what the launches of a piece take on the host."""


class MicroBatchShape(NamedTuple):
    """What a micro-batch's memory depends on."""

    rows: int
    length: int
    """Tokens that each row is padded to."""
    targets: int | None = None
    """Tokens that count in the loss; None: as many as the predictor knows that there may be."""
    accumulating: bool | None = None
    """Whether gradients of an earlier micro-batch exist; None: if the rank's part of a step has more sequences than
    `rows`."""
    patches: int | None = None
    """Of all images; None: each row has the largest image, which plans assume."""
