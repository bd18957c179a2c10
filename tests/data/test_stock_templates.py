"""Sixty conversations through the stock templates of widely used models, compared with the masks of TRL's training
templates.

The templates are those that the package `trl` ships (extra `dev`). Where `trl` is not installed, nothing is tested.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.chat import ChatRenderer, RenderedRows
from engine.data.chat_template import end_of_turn
from engine.data.conversations import THINKING_END
from engine.data.records import ChatRecord, Dropped
from tests.data.conversations import CONVERSATIONS, ODD, PLAIN, SYSTEM, THINKING, TOOL_CALLS, TOOLS, Message
from tests.data.specs import tokenizer


class Family(NamedTuple):
    """A stock template, and where its rows differ from the masks of TRL's training template, with the reason."""

    start: str = ""
    """Pattern of what TRL also learns before an answer: the part of the prompt that TRL's template puts in the mask."""
    end: str = ""
    """Pattern of what ends an answer, where ours and TRL's differ."""
    thinking: bool = False
    """Whether TRL learns answers without their thinking: earlier ones, or all of DeepSeek-V3's. We learn each with its
    own."""


TEMPLATES = {
    "cohere2": Family(),
    "deepseek_r1_distill": Family(start=r"<｜Assistant｜>(<think>\n*)?"),
    "deepseekv3": Family(start=r"<｜Assistant｜>(<think>\n*)?", thinking=True),
    "gemma": Family(),
    "gemma3": Family(),
    "gemma4_v5": Family(),
    "glm4moe": Family(end=r"(<\|user\|>|<eos>)?", thinking=True),  # TRL learns the next turn's role as the end.
    "gptoss": Family(r"<\|start\|>assistant", r"<\|(end|return)\|>", thinking=True),  # A last turn ends with return.
    "idefics3": Family(),
    "lfm2": Family(),
    "llama3": Family(),
    "llama3_1": Family(),
    "nemotron_3_nano": Family(r"<think>(\n+|</think>)?", thinking=True),
    "phi3": Family(end=r"<\|end\|>(\n(<eos>)?)?"),  # TRL also learns the end of sequence behind the last turn's end.
    "phi3_5": Family(end=r"<\|end\|>(\n(<eos>)?)?"),
    "qwen2_5": Family(start=r"\n"),
    "qwen3": Family(),
    "qwen3_5_think": Family(start=r"<think>\n"),
    "qwen3_5_nothink": Family(start=r"<think>\n(\n</think>\n\n)?"),
    "qwen3_instruct_2507": Family(),
    "smolvlm": Family(),
}

NO_SYSTEM = ("gemma",)
"""Templates that refuse a system message."""

CONTROL_TOKEN = re.compile(
    r"<[|｜][^<>|｜\n']{1,40}[|｜]>|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn|channel\||\|channel)>"
)
WORD = re.compile(r"\w+")

TRL = find_spec("trl")
FOLDER = Path(TRL.origin if TRL and TRL.origin else "no trl").parent / "chat_templates"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed")


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def renderer(name: str) -> ChatRenderer:
    """Renderer of a stock template, with its control tokens in the vocabulary."""
    text = template(name)
    made = tokenizer(text)
    made.add_special_tokens({"additional_special_tokens": sorted(set(CONTROL_TOKEN.findall(text)))})
    return ChatRenderer(made, system_prompt=None, learn_all=False)


def rendered(name: str, conversation: str) -> RenderedRows | Dropped:
    tools = TOOLS if conversation in TOOL_CALLS else None
    return renderer(name).render(ChatRecord(CONVERSATIONS[conversation], tools))


def answers(name: str, result: RenderedRows) -> list[str]:
    """Each learned stretch of the rows."""
    found = []
    for row in result.rows:
        assert not isinstance(row, Dropped)
        for learned, group in groupby(zip(*row, strict=True), key=lambda pair: pair[1]):
            if learned:
                ids = [token for token, _ in group]
                found.append(str(renderer(name).tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
    return found


def trl_answers(name: str, messages: list[Message]) -> list[str]:
    """Each stretch of text that TRL's training template marks as learned."""
    parts = renderer(name).template.wants_parts
    given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages] if parts else messages
    options: dict[str, Any] = {"chat_template": template(f"{name}_training"), **tokenizer().special_tokens_map}
    result: Any = render_jinja_template([given], return_assistant_tokens_mask=True, **options)
    texts, spans = result
    marked = [any(start <= place < stop for start, stop in spans[0]) for place in range(len(texts[0]))]
    groups = groupby(zip(texts[0], marked, strict=True), key=lambda pair: pair[1])
    return ["".join(letter for letter, _ in group) for learned, group in groups if learned]


def words(messages: list[Message], *, of_assistant: bool) -> set[str]:
    """The distinct words that the assistant says, or all other roles (`of_assistant` false): in texts without their
    thinking, and in the arguments of tool calls."""
    said = [message for message in messages if (message["role"] == "assistant") == of_assistant]
    calls = [str(call["function"]["arguments"] or "") for message in said for call in message.get("tool_calls", [])]
    texts = [THINKING_END.split(message["content"])[-1].removeprefix("<think>") for message in said]
    return set(WORD.findall(" ".join([*texts, *calls])))


@pytest.mark.parametrize("name", TEMPLATES)
def test_ordinary_conversations_are_never_refused(name: str) -> None:
    ordinary = {**PLAIN, **THINKING, **({} if name in NO_SYSTEM else SYSTEM)}
    refused = {conversation: rendered(name, conversation) for conversation in ordinary}
    assert {conversation: result for conversation, result in refused.items() if isinstance(result, Dropped)} == {}


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_conversations_are_kept_whole_or_dropped_with_the_templates_reason(name: str) -> None:
    for conversation in {**ODD, **TOOL_CALLS}:
        result = rendered(name, conversation)
        assert not isinstance(result, Dropped) or result.reason.startswith("the chat template "), conversation


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_that_the_assistant_says_is_learned_and_nothing_of_the_others(name: str) -> None:
    for conversation, messages in CONVERSATIONS.items():
        result = rendered(name, conversation)
        if isinstance(result, Dropped):
            continue
        learned = set(WORD.findall(" ".join(answers(name, result))))
        ours, others = words(messages, of_assistant=True), words(messages, of_assistant=False)
        thoughts = {word for message in messages for word in WORD.findall(str(message.get("reasoning_content", "")))}
        assert not learned & (others - ours - thoughts - {"think"}), conversation
        assert result.facts["context_only"] or ours <= learned, conversation


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_trls_training_template_marks(name: str) -> None:
    family = TEMPLATES[name]
    if not (FOLDER / f"{name}_training.jinja").is_file():
        pytest.skip("TRL has no training template of it")
    for conversation, messages in {**PLAIN, **THINKING, **({} if name in NO_SYSTEM else SYSTEM)}.items():
        result = rendered(name, conversation)
        assert not isinstance(result, Dropped)
        ours, theirs = answers(name, result), trl_answers(name, messages)
        if family.thinking and conversation in THINKING:
            ours, theirs = ([THINKING_END.split(found[-1])[-1].lstrip()] for found in (ours, theirs))
        assert [shortened(text, family) for text in ours] == [shortened(text, family) for text in theirs], conversation


def shortened(text: str, family: Family) -> str:
    """An answer without what is known to differ, and without the white space that a template adds at its end."""
    text = re.sub(f"^(?:{family.start})", "", text)
    return re.sub(f"(?:{family.end})$", "", text.rstrip() if not family.end else text).strip()


@pytest.mark.parametrize("name", ["phi3", "phi3_5"])
@pytest.mark.parametrize("strips", [False, True])
def test_phi_3_learns_one_end_for_each_answer_as_inference_gives_it(name: str, strips: bool) -> None:
    """`strips`: as in Phi-3's own tokenizer, whose end of turn takes the line break behind it."""
    made = tokenizer(template(name))
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    made.add_special_tokens({"additional_special_tokens": [AddedToken(mark, rstrip=strips) for mark in marks]})
    rendering, messages = ChatRenderer(made, system_prompt=None, learn_all=False), CONVERSATIONS["two_turns"]
    result = rendering.render(ChatRecord(messages))
    assert not isinstance(result, Dropped)
    (row,) = result.rows
    assert not isinstance(row, Dropped)
    learned = [token for token, flag in zip(*row, strict=True) if flag]
    end = made.convert_tokens_to_ids("<|end|>")
    assert [token for token in learned if token in rendering.special_ids] == [end, end] and learned[-1] == end
    assert end_of_turn(made) == end
    asked: Any = made.apply_chat_template(messages[:3], add_generation_prompt=True)
    assert row[0][: len(asked["input_ids"])] == asked["input_ids"]
