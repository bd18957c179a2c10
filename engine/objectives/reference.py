"""Log-probabilities of the reference model in preference learning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.batch import Batch

Reference = Callable[[Batch], Tensor]
"""Log-probabilities of the reference for a batch's rows, float64 [B] on the batch's device."""


def stored_reference(values: NDArray[np.float64], upload: Callable[[Tensor], Tensor]) -> Reference:
    """The reference whose log-probabilities were computed before: `values[sample]`."""
    return lambda batch: upload(torch.from_numpy(values[list(batch.sample_ids)]))
