"""Which tokens end an answer: the tokenizer's end of sequence, those with which the chat template ends answers, and
those that the model's generation_config.json names. The template itself is rendered to find its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from engine.data.chat_template import (
    PROBES,
    ChatTemplate,
    TemplateRefusal,
    end_of_turn,
    special_ids,
    tool_call_shapes,
)

ATTRIBUTE = "model_end_ids"
"""Of a tokenizer: the end tokens that its model's generation config names. It is not saved with the tokenizer."""


def set_model_ends(tokenizer: PreTrainedTokenizerBase, named: Iterable[int]) -> None:
    """Note the end tokens that the generation config of the tokenizer's own model names. Those that were added to the
    vocabulary become special tokens, so that texts of answers leave them out; they are matched in texts as before."""
    ids = [token for token in named if tokenizer.convert_ids_to_tokens(token) is not None]
    for token in ids:
        added = tokenizer.added_tokens_decoder.get(token)
        if added is not None and not added.special:
            flags = {name: getattr(added, name) for name in ("lstrip", "rstrip", "normalized", "single_word")}
            tokenizer.add_tokens([AddedToken(added.content, special=True, **flags)], special_tokens=True)
    setattr(tokenizer, ATTRIBUTE, ids)


def model_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what `set_model_ends` noted."""
    return list(getattr(tokenizer, ATTRIBUTE, ()))


def end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of all tokens that end an answer, the tokenizer's end of sequence first."""
    found = [tokenizer.eos_token_id, *template_ends(tokenizer), *model_ends(tokenizer)]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def template_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens with which the chat template ends an answer, and one that calls tools; empty without a
    template, and where it ends them with plain text."""
    if not tokenizer.chat_template or isinstance(tokenizer.chat_template, dict):
        return []
    return [token for token in (end_of_turn(tokenizer), _end_of_call(tokenizer)) if token is not None]


def _end_of_call(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token at the end of a turn that calls two tools. It must not be in the turn before, as a mark at
    the end of each call does."""
    calls = [{"type": "function", "function": {"name": "a", "arguments": {"b": "c"}}, "id": f"call{number}1234"}
             for number in range(2)]  # fmt: skip
    question: dict[str, Any] = {"role": "user", "content": PROBES[0]}
    exchange = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
    template, special = ChatTemplate(tokenizer), special_ids(tokenizer)
    for shape in tool_call_shapes(exchange):
        try:
            text = template.render(shape, None)
        except TemplateRefusal:
            continue
        answer = text.rpartition(PROBES[0])[2]
        if "a" not in answer:
            return None
        ids = tokenizer(answer.rstrip(), add_special_tokens=False)["input_ids"]
        turn = _behind_prompt(template, question, text, tokenizer)
        return int(ids[-1]) if ids and ids[-1] in special and turn.count(ids[-1]) == 1 else None
    return None


def _behind_prompt(
    template: ChatTemplate, question: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The tokens of the turn that follows `question`."""
    try:
        prompt = template.render([question], None, prompt=True)
    except TemplateRefusal:
        prompt = ""
    turn = text.removeprefix(prompt) if prompt and text.startswith(prompt) else text.rpartition(PROBES[0])[2]
    return list(tokenizer(turn, add_special_tokens=False)["input_ids"])


def ends_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: Iterable[int]) -> bool:
    """Whether a text's last token ends an answer, apart from white space behind it."""
    for token in reversed(ids):
        if token in ends:
            return True
        if str(tokenizer.decode([token], skip_special_tokens=False)).strip():
            return False
    return False
