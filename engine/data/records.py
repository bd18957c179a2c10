"""What a row of a source is turned into before it is tokenised: text, a prompt with its completion, or a conversation.

`engine.data.formats` makes records, `engine.data.tokenise` makes tokens of them.

Try: `tunedeck data -r RECIPE --show 1`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextRecord:
    """Plain text, all of it learned."""

    text: str


@dataclass(frozen=True)
class PairRecord:
    """A prompt, and the completion that is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRecord:
    """A conversation: turns with role and content, and descriptions of the tools that it may use.

    The content of a turn is text, or a list of parts: {"type": "text", "text": …} and {"type": "image"}."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    images: tuple[ImageReference, ...] = ()
    """Where the conversation's images are, in the order of its image parts."""


@dataclass(frozen=True)
class ImageReference:
    """An image of a row: the bytes of an encoded file, or the path of one."""

    path: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Dropped:
    """Takes the place of a row, or of one turn, that is left out, and says why. The report counts these by reason."""

    reason: str


Record = TextRecord | PairRecord | ChatRecord
