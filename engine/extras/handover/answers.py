"""Greedy answers of our own to five prompts, and how those of another program compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.data.chat_template import ChatTemplate, TemplateRefusal
from engine.errors import DataError
from engine.extras.handover.result import Result
from engine.model.config import HUB_ERRORS, auto_class, loading_error
from engine.model.reopened import PROMPTS
from engine.model.saved_adapter import open_adapter
from engine.model.token_rows import grow_for

NEW_TOKENS = 16

TIE = 1 / 128
"""Two tokens whose logits differ by less than this part of the largest logit may change places when another program
rounds otherwise: bf16 has 2^-9 a product."""


@dataclass(frozen=True)
class Prompt:
    messages: list[dict[str, str]]
    text: str
    """As the chat template writes it, else the prompt itself."""
    ids: list[int]


@dataclass(frozen=True)
class Greedy:
    """A greedy answer: its text after each token, without special tokens, and at each token how far the likeliest is
    ahead of the second, as a part of the largest logit."""

    texts: list[str]
    leads: list[float]

    @property
    def text(self) -> str:
        return self.texts[-1] if self.texts else ""


@dataclass(frozen=True)
class Reference:
    prompts: list[Prompt]
    answers: list[Greedy]
    of_base: list[str] | None
    """The answers without the adapter; None for a full model."""

    def judge(self, theirs: Sequence[str]) -> Judgement:
        found = [compare(ours, text) for ours, text in zip(self.answers, theirs, strict=True)]
        changed = None
        if self.of_base is not None:
            told = list(zip(found, self.answers, self.of_base, theirs, strict=True))
            changed = sum(ours.text != base for _, ours, base, _ in told)
            found = [
                "base" if verdict != "same" and text == base != ours.text else verdict
                for verdict, ours, base, text in told
            ]
        return Judgement(found, [each.text for each in self.answers], list(theirs), changed)


@dataclass(frozen=True)
class Judgement:
    verdicts: list[str]
    """For each prompt "same", "tie" (the same up to a token that rounding decides), "base" (what the base answers
    without the adapter) or "other"."""
    ours: list[str]
    theirs: list[str]
    changed: int | None
    """Prompts that the base answers otherwise: only these tell the adapter from its base. None for a full model."""

    @property
    def passed(self) -> bool:
        """Some answers are the same, and none is another than rounding explains."""
        return "same" in self.verdicts and {"same", "tie"} >= set(self.verdicts)

    def told(self, title: str) -> str:
        count = len(self.verdicts)
        same, ties = self.verdicts.count("same"), self.verdicts.count("tie")
        text = f"{title} gives the same greedy answer as Tunedeck on {same} of {count} prompts"
        if ties:
            text += f", on {ties} until a token where rounding decides"
        if ignored := self.verdicts.count("base"):
            text += f", on {ignored} it gives the answer of the base without the adapter"
        if self.changed is not None:
            text += f"; the base alone answers {self.changed} of {count} differently"
        if self.changed == 0:
            text += ", so these prompts do not show that the adapter is used"
        return text


def compare(ours: Greedy, theirs: str) -> str:
    """ "same", "tie" or "other"."""
    theirs = theirs.rstrip("\ufffd")  # the first bytes of a letter
    whole = ours.text.rstrip("\ufffd")
    if theirs == whole:
        return "same"
    parted = next((step for step, text in enumerate(ours.texts) if not theirs.startswith(text.rstrip("\ufffd"))), None)
    lead = ours.leads[-1 if parted is None else parted]
    return "tie" if lead < TIE else "other"


def make_prompts(result: Result) -> list[Prompt]:
    """As users ask: through the chat template, after the system prompt of the data, where there are any. Raises
    DataError where the template does not render them."""
    tokenizer = result.tokenizer
    template = ChatTemplate(tokenizer, variables=result.variables) if tokenizer.chat_template else None
    first = [{"role": "system", "content": result.system}] if result.system else []
    prompts = []
    for text in PROMPTS:
        messages = [*first, {"role": "user", "content": text}]
        if template is not None:
            try:
                written = template.render(messages, None, prompt=True)
            except TemplateRefusal as refusal:
                fix = f"correct the chat template in {result.folder}"
                raise DataError(f"{result.name}: {refusal}", fix=fix) from refusal
            prompts.append(Prompt(messages, written, tokenizer(written, add_special_tokens=False).input_ids))
        else:
            prompts.append(Prompt(messages, text, tokenizer(text).input_ids))
    return prompts


def make_reference(result: Result, *, trust_remote_code: bool = False) -> Reference:
    """Answer with transformers and peft on this machine's CPU, in the dtype of the weights. Raises EnvironmentProblem:
    the base is not to be had."""
    prompts, tokenizer = make_prompts(result), result.tokenizer
    model, of_base = _open(result, trust_remote_code), None
    if result.base is not None:
        # Before the adapter is put on it, which may change its weights.
        of_base = [_answer(model, prompt, tokenizer, result.ends).text for prompt in prompts]
        grow_for(model, result.folder)
        model = open_adapter(model, str(result.folder)).model
    answers = [_answer(model, prompt, tokenizer, result.ends) for prompt in prompts]
    return Reference(prompts, answers, of_base)


def _open(result: Result, trust_remote_code: bool) -> Any:
    weights = result.base or str(result.folder)
    scaled = result.folder / "config.json"
    found: dict[str, Any] = {"revision": result.revision or "main", "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(str(result.folder) if scaled.is_file() else weights, **found)
        model: PreTrainedModel = auto_class(config).from_pretrained(
            weights, config=config, dtype="auto", use_safetensors=True, **found
        )
    except HUB_ERRORS as error:
        raise loading_error(error, weights) from error
    return model.eval()


def _answer(model: Any, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Greedy:
    ids = torch.tensor([prompt.ids])
    # Not the model's own generation config: it may have penalties, and servers are asked for none.
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=list(ends) or None,
        pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new: list[int] = made.sequences[0, ids.shape[1] :].tolist()
    leads = []
    for logits_BV in made.logits:
        first, second = logits_BV[0].float().topk(2).values.tolist()
        leads.append((first - second) / max(float(logits_BV.float().abs().max()), 1e-9))
    texts = [
        str(tokenizer.decode(new[: count + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for count in range(len(new))
    ]
    return Greedy(texts, leads)
