"""Runs a model's decoder on a batch: hidden states without the output head, in the dtype and mode that are asked for.

Shapes: B rows, S tokens, H hidden, E experts.

Try: `python -m pytest tests/model/test_packing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.data.batch import Batch
from engine.model.attention import POSITIONS_BY_AXIS
from engine.model.documents import flash_options, separate_documents, takes_starts
from engine.model.loaded import LoadedModel


def hidden_states(loaded: LoadedModel, batch: Batch) -> Tensor:
    """Compute the last hidden states [B, S, H] of the decoder."""
    return decoder_output(loaded, batch)[0]


def decoder_output(
    loaded: LoadedModel, batch: Batch, *, router_logits: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the last hidden states [B, S, H] of the decoder, and with `router_logits` the logits [B·S, E] of every
    router. transformers collects these: a hook of our own would fire again while a checkpointed layer is recomputed.

    The last token of a row predicts nothing, but is computed: torch's attention kernel for CPUs takes 5 to 18 % longer
    for 255 positions than for 256. Causal models get no mask for padding, because padding is on the right. Flash
    attention separates packed documents only in a batch of one row, so packed rows are concatenated.
    """
    ids_BS, positions_BS = batch.input_ids_BS, batch.position_ids_BS
    mask_BS = batch.attention_mask_BS if loaded.attends_to_padding else None
    # The vision encoder is part of the module around the decoder.
    body = loaded.base.base_model if batch.images else decoder_of(loaded.base)
    shape, extra = ids_BS.shape, _flash_options(loaded, body, batch)
    # Other flash kernels separate the documents of one row by its positions, if they are not told the starts.
    if positions_BS is not None and (extra or (loaded.attention.startswith("flash") and not batch.labels_shifted)):
        ids_BS, positions_BS = ids_BS.reshape(1, -1), positions_BS.reshape(1, -1)
    if positions_BS is not None:
        extra["position_ids"] = _by_axis(loaded, positions_BS)
    if router_logits:
        extra["output_router_logits"] = True
    with _documents_of(batch, handed_over="cu_seq_lens_q" in extra):
        output = body(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False, **{**extra, **batch.images})
    hidden_BSH: Tensor = output.last_hidden_state
    return hidden_BSH.reshape(*shape, -1), output.router_logits if router_logits else ()


def _flash_options(loaded: LoadedModel, body: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the options that tell flash kernels where documents begin, for packed rows and for a single row.

    Several rows that are not packed need none: each is one document. With images none are given, because the vision
    encoder's attention makes such options itself, for its images.
    """
    masked = batch.attention_mask_BS is not None and loaded.attends_to_padding
    whole_rows = batch.position_ids_BS is None and len(batch.input_ids_BS) > 1
    if not takes_starts(loaded.attention) or masked or batch.images or whole_rows:
        return {}
    return flash_options(body, batch.documents)


def _documents_of(batch: Batch, *, handed_over: bool) -> AbstractContextManager[None]:
    """Return a context in which transformers' masks separate the documents of `batch`. If its documents are not known,
    as in a slice of sequence parallelism, the context does nothing, and transformers infers documents from the position
    ids. `handed_over`: the attention kernel gets their positions and needs no mask."""
    if batch.documents is None:
        return nullcontext()
    return separate_documents(not batch.documents.one_per_row, handed_over=handed_over)


def _by_axis(loaded: LoadedModel, positions_BS: Tensor) -> Tensor:
    """Return position ids in the shape that the model expects: [B, S], or [4, B, S] with one axis for text and three
    for images."""
    if loaded.config.model_type not in POSITIONS_BY_AXIS:
        return positions_BS
    return positions_BS.expand(4, *positions_BS.shape)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the module that maps token ids [B, S] to hidden states [B, S, H]: the model without its output head."""
    decoder: torch.nn.Module = model.get_decoder()
    # Llama 4's text model names no decoder, and gives itself: head and all.
    return decoder if decoder is not model else cast(torch.nn.Module, getattr(model, "model", model))


def autocast(loaded: LoadedModel) -> AbstractContextManager[object]:
    """Return a context that autocasts if the model is computed in a narrower dtype than its weights have, else does
    nothing."""
    if loaded.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(loaded.device.torch_device.type, loaded.autocast_dtype)


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode and disable gradients inside the block; afterwards restore the former mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
