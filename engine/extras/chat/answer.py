"""Answers of a chat: which turns of a long history are left out, how long a prompt may be, one answer generated and
streamed without half characters, and what happens when memory runs out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from engine.architecture.positions import positions_of
from engine.budget.predict.inference import generation_bytes
from engine.config.schema.recipe import Generate
from engine.data.chat_template import Message
from engine.data.prompts import PromptTokens, text_of
from engine.device.oom import catch_oom
from engine.errors import DataError, MemoryExhaustedError
from engine.evaluate.answers import FILLED
from engine.evaluate.generation import end_tokens, generate_tokens, generation_config, sampling
from engine.extras.chat.sources import ChatModel, Notify, facts_for_memory, free_for_answers
from engine.model.config import model_config_dict


class FittedPrompt(NamedTuple):
    messages: list[Message]
    ids: list[int]
    left_out: int
    """Messages of the beginning that the prompt has no room for."""


@dataclass
class Conversation:
    """A system prompt, and turns of the user and the model. The last turn is the user's while an answer is made."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self, left_out: int = 0) -> list[Message]:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns[left_out:]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def fitted(self, tokens: PromptTokens, room: int) -> FittedPrompt:
        """The prompt of at most `room` tokens: the oldest exchanges are left out first, never the system prompt or the
        last question, which alone may be longer than `room`."""
        low, high = 0, (len(self.turns) - 1) // 2
        while low < high:  # fewer turns are fewer tokens
            middle = (low + high) // 2
            if len(tokens.ids(self.messages(2 * middle))) <= room:
                high = middle
            else:
                low = middle + 1
        messages = self.messages(2 * low)
        return FittedPrompt(messages, tokens.ids(messages), 2 * low)


StoppedBy = Literal["end", "length", "interrupt"]

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>\Z")
"""A token for one byte. Decoders turn a run of them into characters only if all of its bytes are valid together."""

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not one yet."""

MOST_POSITIONS = 1 << 20
"""Longest prompt that is looked for where the model's config states no number of positions."""


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    token_ids: list[int]
    """With the token that ended it."""
    stopped_by: StoppedBy
    seconds: float


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream(BaseStreamer):
    """Passes on the text of tokens as soon as no later token can change it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        show: Callable[[str], None],
        on_token: Callable[[int], None] = lambda token: None,
    ) -> None:
        self._tokenizer, self._show, self._on_token = tokenizer, show, on_token
        self._ids: list[int] = []
        self._shown, self._has_prompt = "", False

    def put(self, value: Tensor) -> None:
        """Called by transformers, first with the prompt."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for token in value.reshape(-1).tolist():
            self._on_token(token)
            self._ids.append(token)
        self._advance(self._settled_text())

    def end(self) -> None:
        self._advance(decode(self._tokenizer, self._ids))

    def _settled_text(self) -> str:
        settled = len(self._ids)
        while settled and BYTE_TOKEN.match(str(self._tokenizer.convert_ids_to_tokens(self._ids[settled - 1]))):
            settled -= 1
        return decode(self._tokenizer, self._ids[:settled]).rstrip(REPLACEMENT)

    def _advance(self, text: str) -> None:
        if text.startswith(self._shown) and text != self._shown:
            self._show(text[len(self._shown) :])
            self._shown = text


class StopOnRequest(StoppingCriteria):
    def __init__(self, requested: Callable[[], bool]) -> None:
        self._requested = requested

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """bool[B] for tokens [B, S]."""
        return input_ids.new_full((len(input_ids),), self._requested(), dtype=torch.bool)


class Likelihoods(LogitsProcessor):
    """Keeps what the model said of the next token before it is drawn."""

    def __init__(self) -> None:
        self._scores_V: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [1, V] unchanged. What draws the token overwrites them, so they are copied."""
        self._scores_V = scores[0].float().clone()
        return scores

    def of(self, token: int) -> float:
        """The probability, from 0 to 1, at temperature 1."""
        assert self._scores_V is not None
        return float((self._scores_V[token] - self._scores_V.logsumexp(0)).exp())


@dataclass(frozen=True)
class Listener:
    """Who watches an answer while it is written."""

    begun: Callable[[str, int], None] = lambda text, tokens: None
    """Called with the prompt's text and number of tokens; again if the answer begins again after an out-of-memory
    error."""
    text: Callable[[str], None] = lambda text: None
    """Called with further text of the answer."""
    token: Callable[[str, float], None] | None = None
    """Called with each token as text, special ones too, and its likelihood."""
    must_stop: Callable[[], bool] = lambda: False


def _keep(made: list[list[int]], generate: Callable[[], list[int]]) -> None:
    made.append(generate())


@dataclass
class Speaker:
    """Answers with one model; remembers what its memory has room for."""

    model: ChatModel
    tokens: PromptTokens
    settings: Generate
    notify: Notify
    most_tokens: int | None = None
    """Longest prompt, lowered by each out-of-memory error; None before the first."""
    positions: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.positions = positions_of(model_config_dict(self.model.spec))

    def answer(self, conversation: Conversation, draw: int, listener: Listener = Listener()) -> Answer:
        """Answer the conversation's last turn. `draw` numbers the answer: sampling depends on seed and draw alone.

        After an out-of-memory error the history is halved, then the answer's length. Raises DataError if the question
        is longer than the model's positions, MemoryExhaustedError if one token does not fit.
        """
        settings, began = self.settings, time.monotonic()
        while True:
            prompt, settings = self._prompt(conversation, settings)
            listener.begun(self.tokens.text(prompt.messages), len(prompt.ids))
            made: list[list[int]] = []
            generating = partial(self._generate, prompt, settings, draw, listener)
            failure = catch_oom(partial(_keep, made, generating), self.model.loaded.device, "generate")
            if failure is None:
                break
            self.model.loaded.device.release_cached()
            settings = self._halved(conversation, len(prompt.ids), settings)
        answer = made[0]
        text = decode(self.model.loaded.tokenizer, answer)
        asked = text_of(conversation.turns[-1])
        stopped_by = self._stopped_by(answer, settings)
        return Answer(asked, text, answer, stopped_by, round(time.monotonic() - began, 3))

    def _stopped_by(self, answer: list[int], settings: Generate) -> StoppedBy:
        if answer and answer[-1] in end_tokens(self.model.loaded):
            return "end"
        return "length" if len(answer) >= settings.max_new_tokens else "interrupt"

    def _prompt(self, conversation: Conversation, settings: Generate) -> tuple[FittedPrompt, Generate]:
        """The prompt, and the settings with as many new tokens as the model has positions for."""
        room = self._room(settings)
        prompt = conversation.fitted(self.tokens, room)
        ids, left_out = prompt.ids, prompt.left_out
        if left_out:
            self.notify(f"{self.model.label}: the history is longer than {room} tokens; "
                        f"the oldest {left_out} turns are left out of the prompt")  # fmt: skip
        left = MOST_POSITIONS if self.positions is None else self.positions - len(ids)
        if left < 1:
            raise DataError(
                f"the prompt has {len(ids)} tokens, and {self.model.label} has {self.positions} positions",
                fix="shorten the prompt",
            )
        if left < settings.max_new_tokens:
            self.notify(f"{self.model.label}: the answer is limited to {left} tokens, because the model has "
f"{self.positions} positions and the prompt takes {len(ids)}")  # fmt: skip
            settings = settings.model_copy(update={"max_new_tokens": left})
        return prompt, settings

    def _room(self, settings: Generate) -> int:
        """Tokens of a prompt that leave positions and memory for the answer; at least 1."""
        longest = MOST_POSITIONS
        if self.positions is not None:
            longest = self.positions - min(settings.max_new_tokens, self.positions // 2)
        return max(1, min(longest, self.most_tokens or longest, self._fitting(longest, settings)))

    def _fitting(self, longest: int, settings: Generate) -> int:
        """The longest prompt, up to `longest` tokens, whose answer is predicted to fit into free memory."""
        facts = facts_for_memory(self.model.spec)
        if facts is None:
            return longest
        arch, config = facts
        free_bytes = FILLED * free_for_answers(self.model.loaded.device)
        low, high = 0, longest
        while low < high:
            middle = (low + high + 1) // 2
            if generation_bytes(arch, config, rows=1, prompt=middle, generate=settings) <= free_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _halved(self, conversation: Conversation, prompt_tokens: int, settings: Generate) -> Generate:
        """What to do after an out-of-memory error. Raises MemoryExhaustedError if nothing is left to halve."""
        smaller = max(1, prompt_tokens // 2)
        before, after = (conversation.fitted(self.tokens, most).left_out for most in (prompt_tokens, smaller))
        if after > before:
            self.most_tokens = smaller
            self.notify(f"{self.model.label}: out of memory; answering again with at most {smaller} tokens of history")
            return settings
        fewer = settings.max_new_tokens // 2
        if not fewer:
            raise MemoryExhaustedError(
                f"out of memory for an answer of one token to a prompt of {prompt_tokens} tokens",
                fix="shorten the prompt, chat with fewer models, or use a profile with more memory",
            )
        self.notify(f"{self.model.label}: out of memory; answering again with at most {fewer} new tokens")
        return settings.model_copy(update={"max_new_tokens": fewer})

    def _generate(self, prompt: FittedPrompt, settings: Generate, draw: int, listener: Listener) -> list[int]:
        """Token ids of the answer."""
        loaded = self.model.loaded
        device, pad_id = loaded.device, int(loaded.tokenizer.pad_token_id)
        with device.host_region():
            ids_1S = torch.tensor([prompt.ids], dtype=torch.long)
            mask_1S = torch.ones_like(ids_1S)
            shown = self.tokens.image_inputs(prompt.messages, ids_1S)
        images = {name: device.upload(tensor) for name, tensor in shown.items()}
        ids_1S, mask_1S = device.upload(ids_1S), device.upload(mask_1S)
        config = generation_config(settings, end_tokens(loaded) or None, pad_id)
        processors: list[LogitsProcessor] = sampling(settings, [draw], len(prompt.ids), device)
        stream = TextStream(loaded.tokenizer, listener.text)
        if listener.token is not None:
            likelihoods = Likelihoods()
            processors.insert(0, likelihoods)
            tell = partial(_tell_token, loaded.tokenizer, likelihoods, listener.token)
            stream = TextStream(loaded.tokenizer, listener.text, tell)
        with self.model.active():
            made_1S = generate_tokens(
                loaded, ids_1S, mask_1S, config,
                logits_processor=LogitsProcessorList(processors),
                stopping_criteria=StoppingCriteriaList([StopOnRequest(listener.must_stop)]),
                streamer=stream, **images,
            )  # fmt: skip
        answer: list[int] = made_1S[0, len(prompt.ids) :].tolist()
        return answer


def _tell_token(
    tokenizer: PreTrainedTokenizerBase, likelihoods: Likelihoods, tell: Callable[[str, float], None], token: int
) -> None:
    tell(str(tokenizer.decode([token], clean_up_tokenization_spaces=False)), likelihoods.of(token))
