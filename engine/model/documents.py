"""Tells transformers where the documents of a micro-batch begin, so that it does not read position ids back from the
device.

transformers finds packed documents by the values of position ids, once for each mask or, with a flash kernel, in every
layer. Each time the host waits until the device has computed all that is queued. The host, which made the micro-batch,
already knows where documents begin (`engine.data.batch.Documents`).

Try: `python -m pytest tests/model/test_flash_lengths.py tests/train/test_host_syncs.py`
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from engine.data.batch import Documents
from engine.spec.attention_kernels import FLASH_KERNELS


def takes_starts(attention: str) -> bool:
    """Whether an attention kernel, by its name in transformers, takes the positions at which documents begin."""
    return attention in FLASH_KERNELS


def flash_options(module: torch.nn.Module, documents: Documents | None) -> dict[str, Any]:
    """Return keyword arguments for the forward of the decoder `module` that tell flash kernels where documents begin
    (transformers' `FlashAttentionKwargs`). Empty if the decoder takes no such arguments, or if `documents` is None or
    does not hold the positions (`starts_D1`)."""
    if documents is None or documents.starts_D1 is None or not takes_any_option(module):
        return {}
    starts_D1, longest = documents.starts_D1, documents.longest
    return {"cu_seq_lens_q": starts_D1, "cu_seq_lens_k": starts_D1, "max_length_q": longest, "max_length_k": longest}


def takes_any_option(module: torch.nn.Module) -> bool:
    """Whether the forward of `module` accepts keyword arguments that it does not name, and passes them on to its
    layers."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


_handed_over = False


def starts_are_handed_over() -> bool:
    """Whether the forward pass that is running was given the `flash_options`, so that its attention kernel needs no
    mask. Set by `separate_documents`."""
    return _handed_over


@contextmanager
def separate_documents(apart: bool, *, handed_over: bool = False) -> Iterator[None]:
    """Inside the block, transformers' attention masks separate the documents of a row if `apart` is True; otherwise
    they treat every row as one document. transformers' `find_packed_sequence_indices` is replaced inside the block.

    `handed_over`: the attention kernel gets the documents' boundaries as arguments of the forward pass (from
    `flash_options`) and separates them itself, so the masks never do, whatever `apart` says.
    """
    global _handed_over
    former = masking_utils.find_packed_sequence_indices

    def known(position_ids: Tensor) -> Tensor | None:
        if not apart or handed_over:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices, _handed_over = known, handed_over
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, _handed_over = former, False
