"""Generates answers to prompts, greedily or by sampling, as the recipe's [generate] table says.

A sampled token depends on the seed, the sample and the token's position alone: the same sample gets the same answer in
any batch, on any rank and after an out-of-memory error. Shapes: B rows, S tokens, V vocabulary, T new tokens.

Try: `tunedeck eval builtin:tiny -p demo -r demo --set generate.temperature=0.7`
"""

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

from engine.device.base import Device
from engine.model.loaded import LoadedModel
from engine.spec.attention_kernels import FLASH_KERNELS
from engine.spec.schema.recipe import Generate

NO_TOKEN = 2**31 - 1
"""A token id beyond every vocabulary: an end that is never generated. For None, transformers takes the model's own."""

DRAW_BITS = 23
"""Random bits of a drawn number in [0, 1): one fewer than fp32's significand has, so that the number times a sum is
always less than the sum."""


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[int],
    settings: Generate,
    images: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    all_ended: Callable[[bool], bool] | None = None,
) -> list[list[int]]:
    """Generate an answer to each of `prompts` (token ids); returns the answers' token ids. `samples` are the prompts'
    numbers in their data set, on which sampling depends.

    Prompts are padded on the left, so that all end at the same position. `images`, called with the padded tokens
    [B, S], returns the model's inputs for the prompts' images. With `all_ended` several ranks generate together: it is
    called after each token with whether all answers here have ended, and returns whether this is so on all ranks.
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
    config = generation_config(settings, tokenizer.eos_token_id if all_ended is None else NO_TOKEN, pad_id)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList(sampling(settings, samples, width, device))}
    end_ids = _end_ids(loaded)
    if all_ended is not None:
        options["stopping_criteria"] = StoppingCriteriaList([EndTogether(end_ids, width, all_ended)])
    made_BS = generate_tokens(loaded, ids_BS, mask_BS, config, **options, **shown)
    answers: list[list[int]] = made_BS[:, width:].tolist()
    return answers if all_ended is None else [_until_end(answer, end_ids) for answer in answers]


class EndTogether(StoppingCriteria):
    """Ends the generation of answers when those of all ranks have ended: a rank that stopped earlier would be missing
    from the next all-gather of weights."""

    def __init__(self, end_ids: Sequence[int], width: int, all_ended: Callable[[bool], bool]) -> None:
        """`end_ids`: the tokens that end an answer. `width`: tokens of the padded prompts. `all_ended`: see `generate`.
        """
        self._end_ids, self._width, self._all_ended = end_ids, width, all_ended

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Whether generation ends with the last of the tokens [B, S + T], for each row: true for all or for none."""
        answers = input_ids[:, self._width :].tolist()
        ended_here = all(not set(answer).isdisjoint(self._end_ids) for answer in answers)
        return input_ids.new_full((len(input_ids),), self._all_ended(ended_here), dtype=torch.bool)


def _end_ids(loaded: LoadedModel) -> list[int]:
    """The tokens that end an answer: the tokenizer's, or, if it has none, the model's own."""
    found = loaded.tokenizer.eos_token_id
    if found is None:
        found = getattr(loaded.base.generation_config, "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _until_end(answer: list[int], end_ids: Sequence[int]) -> list[int]:
    """The answer's tokens up to the first that ends it, which is included."""
    return next((answer[: at + 1] for at, token in enumerate(answer) if token in end_ids), answer)


def generate_tokens(
    loaded: LoadedModel,
    ids_BS: Tensor,
    mask_BS: Tensor,
    config: GenerationConfig,
    **options: Any,
) -> Tensor:
    """Generate an answer to each prompt of `ids_BS`, whose padding `mask_BS` marks with 0; returns the token ids of
    each prompt followed by its answer, [B, S + T]. `options` are passed on to transformers' `generate`."""
    run = cast(Callable[..., Tensor], loaded.model.generate)
    with half_precision_for_flash(loaded):
        return run(input_ids=ids_BS, attention_mask=mask_BS, generation_config=config, **options)


def half_precision_for_flash(loaded: LoadedModel) -> AbstractContextManager[object]:
    """Return a context manager around generation. For fp32 weights that are computed in half precision with flash
    attention, which takes nothing else, it turns on autocast; for all other models it does nothing.

    Autocast's cache is off: it would keep a half-precision copy of every trained weight until the last token.
    """
    if loaded.autocast_dtype is None or loaded.attention not in FLASH_KERNELS:
        return nullcontext()
    return torch.autocast(loaded.device.torch_device.type, loaded.autocast_dtype, cache_enabled=False)


def generation_config(settings: Generate, eos_id: int | None, pad_id: int) -> GenerationConfig:
    """Create transformers' settings for greedy generation; sampling is done by the processors of `sampling`. The
    model's own sampling settings are ignored, so scores are reproducible."""
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        repetition_penalty=settings.repetition_penalty,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        use_cache=True,
    )


def sampling(settings: Generate, samples: Sequence[int], width: int, device: Device) -> list[LogitsProcessor]:
    """Create the logits processors that turn greedy generation into sampling: temperature, top_k and top_p as in
    transformers, then the random draw. Empty for temperature 0. `samples` are the prompts' numbers in their data set,
    `width` is the length of the padded prompts in tokens."""
    if settings.temperature == 0.0:
        return []
    chain: list[LogitsProcessor] = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        chain.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        chain.append(TopPLogitsWarper(settings.top_p))
    return [*chain, KeyedDraw(settings.seed, samples, width, settings.max_new_tokens, device)]


class KeyedDraw(LogitsProcessor):
    """Draws one token per row from the distribution of its scores, with a random number keyed by (seed, sample,
    position)."""

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
        """Set the scores [B, V] to minus infinity, except for the drawn token of each row; returns the scores."""
        sums_BV = scores.float().softmax(-1).cumsum(-1)
        draw_B1 = self._draws_BT[:, input_ids.shape[1] - self._width, None] * sums_BV[:, -1:]
        # The first token whose sum exceeds the draw: the probability of a token is its part of the sum.
        token_B1 = torch.searchsorted(sums_BV, draw_B1, right=True)
        return scores.fill_(float("-inf")).scatter_(1, token_B1, 0.0)
