"""Generates answers to prompts, greedily or by sampling, as the recipe's [generate] table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.architecture.positions import table_of_positions
from engine.config.attention import FLASH_KERNELS
from engine.config.schema.recipe import Generate
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.model.loaded import LoadedModel
from engine.model.result_files import end_token_ids


def within_positions(settings: Generate, facts: Mapping[str, Any], data: TokenData) -> tuple[Generate, str | None]:
    """Lower max_new_tokens so that prompt and answer fit the model's positions, and say so; unchanged and None if they
    fit.

    `facts` are the model's config. No prompt in `data` may be longer than the model's positions. One limit for the
    whole data set: no answer depends on the prompts generated with it.
    """
    positions = table_of_positions(facts)
    if positions is None:
        return settings, None
    longest = int(data.columns.answer_starts[data.documents[data.row_offsets[:-1]]].max())
    room = max(1, positions - longest)
    if settings.max_new_tokens <= room:
        return settings, None
    note = (
        f"answers are limited to {room} tokens, not {settings.max_new_tokens} (generate.max_new_tokens), "
        f"because the model has {positions} positions and the longest prompt takes {longest}; a lower "
        "data.max_length leaves more for answers"
    )
    return settings.model_copy(update={"max_new_tokens": room}), note


NO_TOKEN = 2**31 - 1
"""A token id beyond every vocabulary: an end that is never generated. For None, transformers takes the model's own."""

DRAW_BITS = 23
"""Random bits of a number in [0, 1): one fewer than fp32's significand, so that number times sum is below the sum."""


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[int],
    settings: Generate,
    images: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    all_ended: Callable[[bool], bool] | None = None,
    stop: StoppingCriteria | None = None,
) -> list[list[int]]:
    """Token ids of an answer to each of `prompts`. Sampling depends on `samples`, the prompts' numbers in their data
    set.

    Prompts are padded on the left, to end at the same position. `images` returns the model's inputs for the images of
    the padded tokens [B, S]. `all_ended`: see EvaluationContext. `stop` ends rows beside the end tokens; what is behind
    the end of a row is not cut off.
    """
    width, tokenizer, device = max(map(len, prompts)), loaded.tokenizer, loaded.device
    pad_id = int(tokenizer.pad_token_id)
    with device.host_region():
        ids_BS = torch.full((len(prompts), width), pad_id, dtype=torch.long)
        mask_BS = torch.zeros_like(ids_BS)
        for row, prompt in enumerate(prompts):
            ids_BS[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BS[row, width - len(prompt) :] = 1
        seen = images(ids_BS) if images is not None else {}
    shown = {name: device.upload(tensor) for name, tensor in seen.items()}
    ids_BS, mask_BS = device.upload(ids_BS), device.upload(mask_BS)
    end_ids = end_tokens(loaded)
    config = generation_config(settings, (end_ids or None) if all_ended is None else NO_TOKEN, pad_id)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList(sampling(settings, samples, width, device))}
    if stop is not None:
        options["stopping_criteria"] = StoppingCriteriaList([stop])
    if all_ended is not None:
        options["stopping_criteria"] = StoppingCriteriaList([EndTogether(end_ids, width, all_ended)])
    made_BS = generate_tokens(loaded, ids_BS, mask_BS, config, **options, **shown)
    answers: list[list[int]] = made_BS[:, width:].tolist()
    return answers if all_ended is None else [_until_end(answer, end_ids) for answer in answers]


class EndTogether(StoppingCriteria):
    """Ends generation with the answers of all ranks: one that stopped earlier would miss the next all-gather of
    weights."""

    def __init__(self, end_ids: Sequence[int], width: int, all_ended: Callable[[bool], bool]) -> None:
        """`width`: tokens of the padded prompts."""
        self._end_ids, self._width, self._all_ended = end_ids, width, all_ended

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """bool[B] for tokens [B, S + T]: true for all rows or for none."""
        answers = input_ids[:, self._width :].tolist()
        ended_here = all(not set(answer).isdisjoint(self._end_ids) for answer in answers)
        return input_ids.new_full((len(input_ids),), self._all_ended(ended_here), dtype=torch.bool)


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Ids of all tokens that end an answer: the tokenizer's end of sequence, the chat template's end of turn, and those
    of the model's generation config that are special tokens of this tokenizer (which may not be the model's own)."""
    return sorted(end_token_ids(loaded.base.generation_config, loaded.tokenizer))


def _until_end(answer: list[int], end_ids: Sequence[int]) -> list[int]:
    """The answer's tokens up to and including the first that ends it."""
    return next((answer[: at + 1] for at, token in enumerate(answer) if token in end_ids), answer)


def generate_tokens(
    loaded: LoadedModel,
    ids_BS: Tensor,
    mask_BS: Tensor,
    config: GenerationConfig,
    **options: Any,
) -> Tensor:
    """Token ids of each prompt and its answer, [B, S + T]; `mask_BS` is 0 at padding. `options`: transformers' own."""
    run = cast(Callable[..., Tensor], loaded.model.generate)
    with half_precision_for_flash(loaded):
        return run(input_ids=ids_BS, attention_mask=mask_BS, generation_config=config, **options)


def half_precision_for_flash(loaded: LoadedModel) -> AbstractContextManager[object]:
    """Autocast around generation, for fp32 weights with flash attention, which takes only half precision; else nothing.

    Autocast's cache is off: it would keep a half-precision copy of every trained weight until the last token.
    """
    if loaded.autocast_dtype is None or loaded.attention not in FLASH_KERNELS:
        return nullcontext()
    return torch.autocast(loaded.device.torch_device.type, loaded.autocast_dtype, cache_enabled=False)


def generation_config(settings: Generate, end_ids: list[int] | int | None, pad_id: int) -> GenerationConfig:
    """Greedy; `sampling` draws. The model's own sampling settings are ignored, so scores are reproducible."""
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        repetition_penalty=settings.repetition_penalty,
        eos_token_id=end_ids,
        pad_token_id=pad_id,
        use_cache=True,
    )


def sampling(settings: Generate, samples: Sequence[int], width: int, device: Device) -> list[LogitsProcessor]:
    """Logits processors that make greedy generation sample: temperature, top_k and top_p as in transformers, then the
    draw. Empty for temperature 0. `width` is the length of the padded prompts."""
    if settings.temperature == 0.0:
        return []
    chain: list[LogitsProcessor] = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        chain.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        chain.append(TopPLogitsWarper(settings.top_p))
    return [*chain, KeyedDraw(settings.seed, samples, width, settings.max_new_tokens, device)]


class KeyedDraw(LogitsProcessor):
    """Draws one token per row, with a random number keyed by (seed, sample, position). So a sample gets the same answer
    in any batch, on any rank and after an out-of-memory error."""

    def __init__(self, seed: int, samples: Sequence[int], width: int, new_tokens: int, device: Device) -> None:
        self._width = width
        bits_BT = [
            np.random.Generator(np.random.Philox([seed, sample])).integers(1 << DRAW_BITS, size=new_tokens)
            for sample in samples
        ]
        with device.host_region():
            draws_BT = torch.from_numpy(np.stack(bits_BT)).float() / (1 << DRAW_BITS)
        self._draws_BT = device.upload(draws_BT)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores [B, V] to minus infinity, except for the drawn token of each row."""
        sums_BV = scores.float().softmax(-1).cumsum(-1)
        draw_B1 = self._draws_BT[:, input_ids.shape[1] - self._width, None] * sums_BV[:, -1:]
        # The first token whose sum exceeds the draw: the probability of a token is its part of the sum.
        token_B1 = torch.searchsorted(sums_BV, draw_B1, right=True)
        return scores.fill_(float("-inf")).scatter_(1, token_B1, 0.0)
