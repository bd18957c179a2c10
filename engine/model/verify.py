"""What training on text relies on, tried on the model as loaded: tokens do not see those behind them, a document keeps
apart from the one packed before it, and decoder and head give the model's own logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from engine.architecture.families import FAMILIES
from engine.data.batch import Batch, Documents
from engine.data.tokens import IGNORED
from engine.device.base import Device
from engine.device.oom import classify
from engine.errors import UsageError
from engine.model.adapted_linear import SHARED
from engine.model.config import auto_class, blaming_own_code
from engine.model.decoder import LARGEST_DIFFERENCE, autocast, decoder_output, eval_mode
from engine.model.head import OutputHead
from engine.model.loaded import LoadedModel
from engine.model.saved_adapter import ADAPTER, PEFT_ERRORS, type_name
from engine.model.trained import decoder_of, embedding_rows

LENGTHS = (11, 9)
"""Tokens of the two documents: shorter than any sliding window, and no multiple of a kernel's block."""
LARGEST_MOVE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative change of a document's hidden states when the document before it is exchanged, by dtype of the
computation: both passes run the same kernels on the same shapes. Families that mix documents move them by over 5 %."""


def require_causality(loaded: LoadedModel) -> None:
    """Run a row, and the same with another last token. UsageError if the hidden states before that token move: the
    model would learn to copy the answer that it sees."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(1, embedding_rows(loaded.base), (LENGTHS[0],), generator=generator)
    other = row.clone()
    other[-1] = row[-1] - 1
    with eval_mode(loaded.model), autocast(loaded):
        one, two = (decoder_output(loaded, _plain(each, loaded))[0][0, :-1].float() for each in (row, other))
    if (moved := _relative(one, two)) > LARGEST_MOVE[loaded.precision.compute]:
        raise UsageError(
            f"{type(loaded.base).__name__} lets tokens attend to later ones: changing the last token of a row "
            f"changes the hidden states before it by {100 * moved:.0f} %",
            expected="a causal language model, which predicts each token from those before it",
            fix="choose another model.id",
        )


def require_separation(loaded: LoadedModel) -> None:
    """Run two packed documents, the same with another first one, and the second alone. UsageError if the second one's
    hidden states depend on the first, or differ from those it has alone (positions that do not restart)."""
    generator = torch.Generator().manual_seed(0)
    first, other, second = (
        torch.randint(1, embedding_rows(loaded.base), (length,), generator=generator)
        for length in (LENGTHS[0], LENGTHS[0], LENGTHS[1])
    )
    with eval_mode(loaded.model), autocast(loaded):
        packed, exchanged, alone = (
            decoder_output(loaded, _row(documents, loaded))[0][0, -LENGTHS[1] :].float()
            for documents in ((first, second), (other, second), (second,))
        )
    if (moved := _relative(packed, exchanged)) > LARGEST_MOVE[loaded.precision.compute]:
        raise _refusal(
            f"changing a document changes the hidden states of the next packed document by {100 * moved:.0f} %"
        )
    if (differs := _relative(packed, alone)) > LARGEST_DIFFERENCE[loaded.precision.compute]:
        raise _refusal(
            f"the hidden states of a packed document differ by {100 * differs:.0f} % from those without packing"
        )


def require_known_family(model_type: str) -> None:
    """UsageError for a family whose packing no test of ours has tried: sharded weights cannot be run before the first
    step, so there the model itself is not asked."""
    if model_type not in FAMILIES:
        raise UsageError(
            f"data.packing = true, but it is unknown whether {model_type} keeps packed documents separate, and "
            "sharded weights cannot be tested before the first step",
            fix='set data.packing = false, or parallel.strategy = "replicated"',
        )


def _plain(ids_S: Tensor, loaded: LoadedModel) -> Batch:
    """A row without positions, which not every model takes."""
    ids_BS = ids_S[None]
    batch = Batch(ids_BS, torch.full_like(ids_BS, IGNORED), None, None, (0,), 0)
    return batch.moved(lambda tensor: tensor.to(loaded.device.torch_device))


def _row(documents: tuple[Tensor, ...], loaded: LoadedModel) -> Batch:
    lengths = torch.tensor([0, *(len(document) for document in documents)], dtype=torch.int32)
    ids_BS = torch.cat(documents)[None]
    return Batch(
        ids_BS,
        torch.full_like(ids_BS, IGNORED),
        None,
        torch.cat([torch.arange(len(document)) for document in documents])[None],
        (0,),
        0,
        documents=Documents(lengths.cumsum(0, dtype=torch.int32), int(lengths.max()), len(documents) == 1),
    ).moved(lambda tensor: tensor.to(loaded.device.torch_device))


def _relative(one_SH: Tensor, other_SH: Tensor) -> float:
    return float((one_SH - other_SH).norm() / one_SH.norm())


def _refusal(found: str) -> UsageError:
    return UsageError(
        f"data.packing = true, but with this model {found}",
        expected="a model that gives the same results with and without packing",
        fix="set data.packing = false",
    )


def verify_logits(loaded: LoadedModel, head: OutputHead, device: Device) -> None:
    """Check on four tokens that decoder and head give the model's own logits. UsageError: they differ by more than the
    dtype's rounding, are not finite, or take more than text."""
    model = loaded.base
    blaming = blaming_own_code(model.config, str(model.name_or_path))
    with eval_mode(loaded.model), autocast(loaded), blaming, _blaming_text_alone(model):
        ids_BS = torch.arange(4, device=device.torch_device)[None] % head.vocabulary
        own_BSV = model(input_ids=ids_BS, use_cache=False).logits.float()
        hidden_BSH = decoder_of(model)(input_ids=ids_BS, use_cache=False).last_hidden_state
        ours_BSV = head.logits(hidden_BSH)
        error = float((own_BSV - ours_BSV).abs().max())
        size = float(own_BSV.abs().max())
    if not math.isfinite(size):
        raise UsageError(
            f"the model's logits are not finite in {loaded.precision.compute}",
            expected="a dtype that works for this model family",
            fix='set model.dtype to "bfloat16" or "float32"; if that does not help, the weights are broken',
        )
    tolerance = 1e-4 if loaded.precision.compute == torch.float32 else 4e-2
    if not error <= tolerance * max(size, 1e-3):
        raise UsageError(
            f"the logits of {model.config.model_type} are not the output of its decoder and head (off by "
            f"{error:.3g} of {size:.3g}), so its loss cannot be computed in chunks",
            expected="an architecture whose logits are scale, soft-cap and head of the hidden states",
            fix="choose another model.id",
        )


def require_peft_results(loaded: LoadedModel) -> None:
    """Compute loss and gradient of a few tokens with the adapter that is continued, once as training does and once with
    peft's own forward pass. UsageError: they differ, so that training would compute another model than the adapter's
    (aLoRA and X-LoRA act on the whole model, AdaLoRA adds to the loss), or peft computes none."""
    model = cast(PeftModel, loaded.model)
    config = model.peft_config[ADAPTER]
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(1, embedding_rows(loaded.base), (2, 2 * LENGTHS[0]), generator=generator)
    # Some types act only where certain tokens are, which their config names.
    named = [value for value in vars(config).values() if _are_tokens(value, embedding_rows(loaded.base))]
    ids_BS = torch.cat([ids_BS[:, :3], *(torch.tensor(ids).expand(2, -1) for ids in named), ids_BS], 1)
    given: dict[str, Any] = {"input_ids": ids_BS.to(loaded.device.torch_device)}
    given |= {"attention_mask": torch.ones_like(given["input_ids"]), "labels": given["input_ids"]}
    trained = [parameter for _, parameter in loaded.trainable()]
    try:
        with torch.enable_grad(), without_dropout(model), autocast(loaded):
            ours = _loss_and_gradient(loaded.base, given, trained)
            with computed_by_peft(model):
                theirs = _loss_and_gradient(model, given, trained)
    except PEFT_ERRORS as error:
        if classify(error) is not None:
            raise
        raise _not_continued(loaded, f"its layers fail: {error}") from error
    moved = _difference(ours, theirs)
    if not moved <= LARGEST_DIFFERENCE[loaded.precision.compute]:
        raise _not_continued(
            loaded,
            f"peft's forward pass gives a different gradient than Tunedeck's training (they differ by {moved:.0%})",
        )


def require_mergeable(loaded: LoadedModel) -> None:
    """Merge a copy of one layer of each class with its adapter. UsageError if that is not possible: no such result can
    become a model (matrices with biases on layers without one)."""
    model = cast(PeftModel, loaded.model)
    tried = set()
    for module in model.modules():
        sort = type(module), type(getattr(module, "base_layer", None))
        if not isinstance(module, BaseTunerLayer) or isinstance(module, ParamWrapper) or sort in tried:
            continue
        tried.add(sort)
        in_four_bits = any(not each.is_floating_point() for each in module.parameters())
        if ADAPTER not in module.active_adapters or in_four_bits:
            continue  # weights in 4 bits are merged from their files
        # Neither the layers that read the same input, nor what peft was given to make this one, belong to the copy.
        others = [each for key in (SHARED, "kwargs") if (each := vars(module).get(key)) is not None]
        try:
            copy.deepcopy(module, {id(each): None for each in others}).merge(safe_merge=True)
        except PEFT_ERRORS as error:
            if classify(error) is not None:
                raise
            raise _not_continued(loaded, f"peft cannot merge the result into its base: {error}") from error


def _are_tokens(value: object, rows: int) -> bool:
    """Whether a value of an adapter's config may be a sequence of token ids."""
    return isinstance(value, list) and bool(value) and all(type(each) is int and 0 <= each < rows for each in value)


def _loss_and_gradient(model: nn.Module, given: Mapping[str, Any], trained: Sequence[Tensor]) -> list[Tensor | None]:
    loss: Tensor = model(**given, use_cache=False).loss
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), *gradients]


def _difference(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The largest relative difference: of the loss, and of the whole gradient. A gradient that is None counts as 0."""
    loss, apart, size = 0.0, 0.0, 0.0
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        one, other = (None if each is None else each.float() for each in pair)
        between = other if one is None else one if other is None else one - other
        squared = 0.0 if between is None else float(between.square().sum())
        whole = 0.0 if other is None else float(other.square().sum())
        if number == 0:
            loss = math.sqrt(squared / whole) if whole else math.inf
        else:
            apart, size = apart + squared, size + whole
    return max(loss, math.sqrt(apart / size) if size else math.inf if apart else 0.0)


def _not_continued(loaded: LoadedModel, reason: str) -> UsageError:
    config = cast(PeftModel, loaded.model).peft_config[ADAPTER]
    return UsageError(
        f"the adapter that is continued ({type_name(config)}) cannot be trained here: {reason}",
        expected="an adapter that only changes layers and can be merged",
        fix="start a new adapter by leaving out model.adapter",
    )


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients inside the block; afterwards the former mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def computed_by_peft(model: nn.Module) -> Iterator[None]:
    """Inside the block, the layers of adapters compute with peft's own forward."""
    ours = [
        (module, vars(module).pop("forward"))
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and "forward" in vars(module)
    ]
    try:
        yield
    finally:
        for module, forward in ours:
            vars(module)["forward"] = forward


@contextmanager
def _blaming_text_alone(model: PreTrainedModel) -> Iterator[None]:
    """Make an error of a class with a vision encoder a UsageError: it was given no image."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        if auto_class(model.config) is not AutoModelForImageTextToText:
            raise
        raise UsageError(
            f"{type(model).__name__} cannot run on text alone: {error}",
            expected="a model that predicts text from text alone",
            fix="choose another model.id",
        ) from error
