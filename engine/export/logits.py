"""Compares two forms of a model by their logits on five prompts: the adapter on its base, and the merged model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.errors import EnvironmentProblem

PROMPTS = (
    "The capital of France is",
    "Question: what is 12 + 30?\nAnswer:",
    "def reverse(text):\n    return",
    "Once upon a time there was a",
    '{"name": "Ada", "born": ',
)
"""Prose, arithmetic, code and JSON."""

OTHER_MODEL = 0.25
"""Difference, as a part of the largest logit, beyond which no rounding explains it. bf16 has 2^-9 a weight."""


def logits_on_prompts(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """fp32 logits [S, V] of each of PROMPTS."""
    model.eval()
    with torch.no_grad():
        return [model(**_inputs(text, tokenizer)).logits[0].float() for text in PROMPTS]


def _inputs(text: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True))


def compare_bases(seen: list[Tensor], kept: list[Tensor], rounded: list[Tensor]) -> str:
    """A sentence on two merged models of an adapter that was trained on a 4-bit base, each beside that training:
    merged onto the base's own weights, and onto the base rounded to 4 bits and back."""
    largest = max(float(each.abs().max()) for each in seen)
    return (
        "beside the 4-bit base that the adapter was trained on, the largest difference of logits is "
        f"{largest_difference(seen, kept):.2g} merged onto the base's own weights, "
        f"{largest_difference(seen, rounded):.2g} merged onto the dequantized ones (largest logit {largest:.2g})"
    )


def compare_logits(adapter: list[Tensor], merged: list[Tensor], *, has_routers: bool) -> str:
    """A sentence with the largest difference. Raises EnvironmentProblem if the two are different models: by the largest
    difference, and in a mixture, where rounding may send single tokens to other experts, by the median position."""
    difference, largest = largest_difference(adapter, merged), max(float(each.abs().max()) for each in adapter)
    same = sum(int(one[-1].argmax() == other[-1].argmax()) for one, other in zip(adapter, merged, strict=True))
    told = (
        f"largest difference of merged and adapter logits on {len(PROMPTS)} prompts: {difference:.2g} "
        f"(largest logit {largest:.2g}); next token the same on {same} of {len(PROMPTS)}"
    )
    each_position = [(one - other).abs().amax(dim=-1) for one, other in zip(adapter, merged, strict=True)]
    decides = float(torch.cat(each_position).median()) if has_routers else difference
    if not decides <= OTHER_MODEL * largest:
        raise EnvironmentProblem(
            told, expected="the merged model to compute what the adapter does", fix="serve the adapter, and report this"
        )
    return told
