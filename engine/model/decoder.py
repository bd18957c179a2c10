"""Runs a model's decoder on a batch: hidden states in the dtype and mode asked for. `require_images` tries it on an
image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.data.batch import Batch
from engine.data.images import ImageFacts
from engine.data.own_processor import OwnProcessor
from engine.device.base import Device
from engine.errors import UsageError
from engine.model.attention import POSITIONS_BY_AXIS
from engine.model.head import find_head
from engine.model.loaded import LoadedModel
from engine.model.positions import flash_options, separate_documents, takes_starts
from engine.model.trained import decoder_of

TRIED_SIZE = (80, 60)
"""Height and width, in pixels, of the image on which `require_images` tries a model."""
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest relative difference between two computations of the same logits or hidden states, by dtype of the
computation: where shapes differ, so does the order in which kernels sum."""


def require_images(loaded: LoadedModel) -> None:
    """Run a model on a row with an image, as its own processor encodes it and as it is trained. Does nothing without an
    `OwnProcessor`. UsageError: the two differ, the model refuses them, or it does not see the image."""
    own, base = loaded.images, loaded.base
    if not isinstance(own, OwnProcessor):
        return
    noise = torch.randint(0, 256, (2, *TRIED_SIZE, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batches = [_with_image(own, pixels.numpy(), loaded.device) for pixels in noise]
    with eval_mode(loaded.model), autocast(loaded):
        try:
            whole_SV = base(**{"input_ids": batches[0].input_ids_BS, **batches[0].images}, use_cache=False).logits[0]
            hidden_SH, other_SH = (hidden_states(loaded, batch)[0].float() for batch in batches)
            ours_SV = find_head(base).logits(hidden_states(loaded, batches[0])[0])
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            raise _image_refused(base, f"fails on the output of its processor for an image: {error}") from error
    difference = float((ours_SV.float() - whole_SV.float()).norm() / whole_SV.float().norm())
    if not difference <= LARGEST_DIFFERENCE[loaded.precision.compute]:
        raise _image_refused(base, f"gives logits that differ by {100 * difference:.0f} % when trained on an image")
    if torch.equal(hidden_SH, other_SH):
        raise _image_refused(base, "gives the same output for two different images")


def _with_image(own: OwnProcessor, pixels: NDArray[Any], device: Device) -> Batch:
    """A row of one image alone."""
    height, width, _ = pixels.shape
    ids_BS = torch.tensor([own.expansion(ImageFacts(height, width, 0))])
    batch = Batch(ids_BS, ids_BS.clone(), None, None, (0,), ids_BS.numel(), own.inputs([{"image": pixels}], ids_BS))
    return batch.moved(device.upload)


def _image_refused(base: PreTrainedModel, found: str) -> UsageError:
    return UsageError(
        f"{type(base).__name__} {found}",
        expected="a model that uses the output of its image processor",
        fix="choose another model.id, or train on text: remove the sources with images",
    )


def hidden_states(loaded: LoadedModel, batch: Batch) -> Tensor:
    return decoder_output(loaded, batch)[0]


def decoder_output(
    loaded: LoadedModel, batch: Batch, *, router_logits: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Last hidden states [B, S, H], and with `router_logits` the logits [B·S, E] of every router. transformers collects
    these: a hook of our own would fire again while a checkpointed layer is recomputed.

    The last token predicts nothing, but is computed: torch's CPU attention takes 5 to 18 % longer for 255 positions
    than for 256. Causal models get no mask for padding, which is on the right. Flash attention separates packed
    documents only in a batch of one row, so packed rows are concatenated.
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
    with _documents_of(batch, body, positions_BS, handed_over="cu_seq_lens_q" in extra, masked=mask_BS is not None):
        output = body(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False, **{**extra, **batch.images})
    hidden_BSH: Tensor = output.last_hidden_state
    return hidden_BSH.reshape(*shape, -1), output.router_logits if router_logits else ()


def _flash_options(loaded: LoadedModel, body: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """Options that tell flash kernels where documents begin, for packed rows and for a single row. Several unpacked
    rows need none. With images none are given: the vision encoder makes such options itself, for its images."""
    masked = batch.attention_mask_BS is not None and loaded.attends_to_padding
    whole_rows = batch.position_ids_BS is None and len(batch.input_ids_BS) > 1
    if not takes_starts(loaded.attention) or masked or batch.images or whole_rows:
        return {}
    return flash_options(body, batch.documents)


def _documents_of(
    batch: Batch, body: nn.Module, positions_BS: Tensor | None, *, handed_over: bool, masked: bool
) -> AbstractContextManager[None]:
    """Context in which transformers' masks separate the documents of `batch`. Does nothing if they are unknown, as in a
    slice of sequence parallelism; transformers then infers them from position ids. `handed_over`: the kernel needs no
    mask. `masked`: the decoder is given a mask for padding."""
    if batch.documents is None:
        return nullcontext()
    apart = not batch.documents.one_per_row
    return separate_documents(body, positions_BS, apart=apart, handed_over=handed_over, masked=masked)


def _by_axis(loaded: LoadedModel, positions_BS: Tensor) -> Tensor:
    """Position ids as the model expects them: [B, S], or [4, B, S] with one axis for text and three for images."""
    if loaded.config.model_type not in POSITIONS_BY_AXIS:
        return positions_BS
    return positions_BS.expand(4, *positions_BS.shape)


def autocast(loaded: LoadedModel) -> AbstractContextManager[object]:
    """Mixed precision: autocast if the model is computed in a narrower dtype than its weights have, else nothing."""
    if loaded.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(loaded.device.torch_device.type, loaded.autocast_dtype)


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block; afterwards the former mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
