"""Rows of the embedding and of the output head that are trained beside a frozen base, for `model.add_tokens`.

They are peft's trainable tokens, so an adapter holds them and peft opens it. peft's own forward copies the whole
embedding with the trained rows in it, in every pass and for every chunk of the loss; here the base computes, and its
results for these tokens are replaced. Shapes: T tokens, H hidden, V vocabulary, K trained rows, N rows of the head's
input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.architecture.token_rows import grown_rows
from engine.errors import UsageError
from engine.model.adapted_linear import weight_gradient
from engine.model.tensor_file import saved_shapes
from engine.model.trained import embedding_rows, language_model

EMPTY_SHARE = 0.1
"""A row whose norm is below this share of the mean norm was never trained, as those of reserved tokens."""
IDS = "trained_ids_K"
"""Attribute of a layer with trained rows: their ids as a tensor on its device."""


def grow_embedding(model: PreTrainedModel, needed: int) -> None:
    """Give embedding and head at least `needed` rows; new ones are the mean of the others. UsageError: the model cannot
    be resized."""
    _grow(model, grown_rows(embedding_rows(model), needed))


def _grow(model: PreTrainedModel, rows: int) -> None:
    before = embedding_rows(model)
    if rows == before:
        return
    try:
        model.resize_token_embeddings(rows, mean_resizing=False)
    except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
        raise _cannot_grow(model, str(error)) from error
    head = language_model(model).get_output_embeddings()
    if head is None or embedding_rows(model) != rows or len(head.weight) != rows:
        raise _cannot_grow(model, "its output head has a different size")
    with torch.no_grad():
        for each in {id(w): w for w in (model.get_input_embeddings().weight, head.weight)}.values():
            table_VH = cast(Tensor, each)
            table_VH[before:] = _mean(table_VH[:before])


def grow_for(model: PreTrainedModel, adapter: Path) -> None:
    """Give a base the rows of a saved adapter: those of the embedding or the head that it holds in full, or at least
    those that it trains. UsageError: the model cannot be resized."""
    head = language_model(model).get_output_embeddings()
    ends = {id(model.get_input_embeddings()), id(head)}
    names = [name for name, module in model.named_modules() if id(module) in ends]
    rows, needed = rows_of_adapter(adapter, names)
    if rows is not None and rows >= embedding_rows(model):
        _grow(model, rows)
    else:
        grow_embedding(model, needed)


def rows_of_adapter(adapter: Path, tables: Sequence[str]) -> tuple[int | None, int]:
    """(rows of those modules `tables` that a saved adapter holds in full, None if it holds none; rows that its trained
    tokens need)."""
    shapes = saved_shapes(adapter)
    held = [shapes[key][0] for name in tables if (key := f"base_model.model.{name}.weight") in shapes]
    indices: Any = getattr(PeftConfig.from_pretrained(str(adapter)), "trainable_token_indices", None) or {}
    ids = [number for each in (indices.values() if isinstance(indices, dict) else [indices]) for number in each]
    return max(held, default=None), max(ids, default=-1) + 1


def fill_empty_rows(model: PreTrainedModel, ids: list[int]) -> None:
    """Set those rows of `ids` to the mean of all that were never trained."""
    head = language_model(model).get_output_embeddings()
    tables = [model.get_input_embeddings().weight, *([head.weight] if head is not None else [])]
    with torch.no_grad():
        for each in {id(w): w for w in tables}.values():
            table_VH = cast(Tensor, each)
            if table_VH.device.type == "meta":
                continue
            mean_H, norms_K = _mean(table_VH), table_VH[ids].float().norm(dim=1)
            usual = table_VH[:: max(1, len(table_VH) // 4096)].float().norm(dim=1).mean()
            for number, norm in zip(ids, norms_K.tolist(), strict=True):
                if norm < EMPTY_SHARE * float(usual):
                    table_VH[number] = mean_H


def _mean(table_VH: Tensor) -> Tensor:
    """Summed in fp32 a piece at a time: no copy of the table."""
    pieces = table_VH.split(4096)
    total_H = torch.stack([piece.float().sum(0) for piece in pieces]).sum(0)
    return (total_H / len(table_VH)).to(table_VH.dtype)


def _cannot_grow(model: PreTrainedModel, reason: str) -> UsageError:
    return UsageError(
        f"{type(model).__name__} does not support added tokens: {reason}",
        expected="a model whose embedding transformers can resize",
        fix="leave out model.add_tokens, or use tokens that are in the vocabulary",
    )


def token_ids(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    """Ids of tokens that are in the vocabulary, ascending."""
    vocabulary = tokenizer.get_vocab()
    return sorted({vocabulary[token] for token in tokens})


def row_targets(model: PreTrainedModel, ids: list[int], whole: list[str]) -> dict[str, list[int]]:
    """peft's trainable_token_indices: the embedding's module, and the head's unless it is tied; without modules that
    are trained in full."""
    head = language_model(model).get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    wanted = [model.get_input_embeddings(), *([] if tied or head is None else [head])]
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(module)] for module in wanted]
    if whole and any(name in whole for name in found) and not all(name in whole for name in found):
        missing = next(name for name in found if name not in whole)
        raise UsageError(
            f"method.also_train trains only part of the added tokens' weights, not {missing}",
            expected="both embedding and head",
            fix=f'add "{missing}" to method.also_train, or remove the other',
        )
    return {name: ids for name in found if name not in whole}


def expect_trained_ends(model: PreTrainedModel) -> None:
    """Raise UsageError if full fine-tuning leaves the embedding, or the head, frozen."""
    head = language_model(model).get_output_embeddings()
    ends: list[Any] = [model.get_input_embeddings(), *([] if head is None else [head])]
    frozen = [each for each in ends if not each.weight.requires_grad]
    if frozen:
        name = next(name for name, module in model.named_modules() if module is frozen[0])
        raise UsageError(
            f"model.add_tokens: {name} is frozen, so the added tokens would not be trained",
            expected="trained embedding and output head",
            fix=f'add "{name}" to method.train_only, or remove it from method.freeze',
        )


def expect_rows_of(model: PeftModel, adapter: str, ids: list[int]) -> None:
    """Raise UsageError if a saved adapter trains other rows than those of the added tokens."""
    config = model.peft_config["default"]
    saved = getattr(config, "trainable_token_indices", None) or {}
    whole = set(getattr(config, "modules_to_save", None) or [])
    rows = saved.values() if isinstance(saved, dict) else [saved]
    if any(sorted(each) != ids for each in rows) or (ids and not saved and not whole):
        raise UsageError(
            f"the adapter {adapter} was trained with other added tokens than model.add_tokens",
            expected="the tokens of the adapter",
            fix="set model.add_tokens as in the recipe of the adapter",
        )


def replace_row_forward(model: nn.Module) -> None:
    """Replace peft's forward of every layer with trained rows."""
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer) and _active(module) is not None:
            (ids,) = module.token_indices.values()
            weight = cast(Tensor, module.get_base_layer().weight)
            module.register_buffer(IDS, torch.tensor(ids, device=weight.device), persistent=False)
            vars(module)["forward"] = MethodType(_forward, module)


@dataclass(frozen=True)
class HeadRows:
    """The trained rows of an output head."""

    ids_K: Tensor
    rows_KH: Tensor


def head_rows(project: nn.Module) -> tuple[nn.Module, HeadRows | None]:
    """The head as the base has it, and its trained rows that are in use."""
    layer = getattr(project, "token_adapter", None)
    if not isinstance(layer, TrainableTokensLayer) or not hasattr(layer, IDS):
        return project, None
    active = _active(layer)
    base: nn.Module = layer.get_base_layer()
    return base, None if active is None else HeadRows(getattr(layer, IDS), layer.trainable_tokens_delta[active])


def _active(layer: TrainableTokensLayer) -> str | None:
    """The one adapter whose rows are in use."""
    names = [name for name in layer.active_adapters if name in layer.trainable_tokens_delta]
    return names[0] if len(names) == 1 and not layer.disable_adapters and not layer.merged else None


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    name = _active(layer)
    if name is None or args or kwargs:
        return cast(Tensor, type(layer).forward(layer, x, *args, **kwargs))
    base, ids_K, rows_KH = layer.get_base_layer(), getattr(layer, IDS), layer.trainable_tokens_delta[name]
    embed: Callable[..., Tensor] = _EmbeddedRows.apply
    project: Callable[..., Tensor] = _ProjectedRows.apply
    if isinstance(base, nn.Embedding):
        return embed(x, rows_KH, ids_K, base, layer._get_embed_scale())
    return project(x, rows_KH, ids_K, base)


class _EmbeddedRows(torch.autograd.Function):
    """base(ids), with the trained rows in place of the base's. A product with the one-hot matrix of the tokens, which
    is exact, needs neither a copy of the output nor a wait for the device, and its gradient has one order of sums."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, rows_KH: Tensor, ids_K: Tensor, base: nn.Module, scale: Tensor | None) -> Tensor:
        output: Tensor = base(ids)
        output_TH = output.view(-1, output.shape[-1])
        hot_TK = _one_hot(ids, ids_K, output.dtype)
        rows = rows_KH.to(output.dtype)
        scaled = rows if scale is None else rows * scale.to(output.dtype)
        output_TH.masked_fill_(hot_TK.any(1, keepdim=True), 0.0)
        output_TH.addmm_(hot_TK, scaled)
        ctx.ids, ctx.ids_K, ctx.scale, ctx.dtype = ids, ids_K, scale, rows_KH.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_TH = gradients[0].reshape(-1, gradients[0].shape[-1])
        grad_KH = weight_gradient(_one_hot(ctx.ids, ctx.ids_K, grad_TH.dtype), grad_TH, torch.float32)
        if ctx.scale is not None:
            grad_KH *= ctx.scale.float()
        return None, grad_KH.to(ctx.dtype), None, None, None


class _ProjectedRows(torch.autograd.Function):
    """base(x), with the logits of the trained rows in place of the base's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_KH: Tensor, ids_K: Tensor, base: nn.Linear) -> Tensor:
        logits = base(x)
        put_logits(logits, x, HeadRows(ids_K, rows_KH), base.bias)
        ctx.save_for_backward(x, rows_KH)
        ctx.base, ctx.ids_K = base, ids_K
        return cast(Tensor, logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, rows_KH = ctx.saved_tensors
        rows, weight_VH = HeadRows(ctx.ids_K, rows_KH), ctx.base.weight.to(x.dtype)
        grad_NV, x_NH = gradients[0].reshape(-1, gradients[0].shape[-1]), x.reshape(-1, x.shape[-1])
        grad_NH = grad_NV @ weight_VH if ctx.needs_input_grad[0] else None
        grad_KH = torch.zeros_like(rows_KH, dtype=torch.float32)
        add_gradients(grad_NH, grad_KH, grad_NV, x_NH, weight_VH, rows)
        return None if grad_NH is None else grad_NH.view(x.shape), grad_KH.to(rows_KH.dtype), None, None


def put_logits(logits: Tensor, x: Tensor, rows: HeadRows, bias_V: Tensor | None) -> None:
    """Put the trained rows' logits in place of the base's; `x` [..., H] made `logits` [..., V]."""
    own = x @ rows.rows_KH.to(x.dtype).t()
    if bias_V is not None:
        own += bias_V[rows.ids_K].to(own.dtype)
    logits.index_copy_(-1, rows.ids_K, own.to(logits.dtype))


def add_gradients(
    grad_NH: Tensor | None, grad_KH: Tensor | None, grad_NV: Tensor, x_NH: Tensor, weight_VH: Tensor, rows: HeadRows
) -> None:
    """Add the gradient of the trained rows to `grad_KH` (fp32), and what they change to `grad_NH`, the gradient through
    the base."""
    grad_NK = grad_NV.index_select(-1, rows.ids_K)
    if grad_KH is not None:
        grad_KH += weight_gradient(grad_NK, x_NH, torch.float32)
    if grad_NH is not None:
        grad_NH.addmm_(grad_NK, rows.rows_KH.to(x_NH.dtype) - weight_VH.index_select(0, rows.ids_K))


def _one_hot(ids: Tensor, ids_K: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K]"""
    return (ids.reshape(-1, 1) == ids_K).to(dtype)
