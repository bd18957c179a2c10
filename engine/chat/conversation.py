"""Conversations: their turns, and which turns are left out when a history is too long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.data.chat_template import Message
from engine.data.prompts import PromptTokens


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
