"""The lines of a column of the Chat screen: a model's conversation, its answer word by word beside another's, or its
last answer token by token. Functions from a `ChatState` to lines; they read no files and use no widgets.

Try: `A` on the Run screen of a run that has a checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from textual.content import Content

from engine.config.files.text import visible
from engine.journal.chats import ChatState, Exchange, Reply

LIKELIHOODS = ((0.9, ""), (0.5, "$info"), (0.2, "$caution"), (0.05, "$bad"), (0.0, "bold reverse $bad"))
"""Least likelihood of a token, and the style that shows it."""

MOST_UNLIKELY = 3
"""Tokens that are named below an answer, with their likelihood."""

WORDS = re.compile(r"\s+|\w+|[^\w\s]")

ENDINGS = {"": "…", "end": "", "length": "[generate.max_new_tokens reached]", "interrupt": "[interrupted]"}
"""What stands behind an answer, by what ended it."""


def conversation_lines(state: ChatState, model: str, width: int, against: str = "") -> list[Content]:
    """All questions, with the answers of one model; with `against`, words that this other model's answer to the last
    question does not have are marked."""
    found: list[Content] = []
    for number, exchange in enumerate(state.exchanges):
        pictures = "".join(f"[{path}] " for path in exchange.images)
        found += _wrapped(Content.styled(f"> {visible(pictures + exchange.question, keep='')}", "bold"), width)
        reply, last = exchange.replies.get(model), number == len(state.exchanges) - 1
        if reply is None:
            found += [Content.styled("not asked" if state.status != "answering" else "waiting", "$muted"), Content("")]
            continue
        other = exchange.replies.get(against) if last and against else None
        body = _marked(reply.text, other.text) if other is not None else Content(visible(reply.text, keep="\n"))
        found += _wrapped(body, width)
        found += [*_wrapped(Content.styled(_footnote(reply, exchange), "$muted"), width), Content("")]
    return found


def _footnote(reply: Reply, exchange: Exchange) -> str:
    if not reply.stopped_by:
        return ENDINGS[""]
    speed = f"{reply.tokens / reply.seconds:.0f} tokens/s" if reply.seconds else ""
    earlier = f"answer {len(exchange.earlier) + 1}" if exchange.earlier else ""
    parts = [ENDINGS.get(reply.stopped_by, ""), f"{reply.tokens} tokens", speed, earlier]
    return "  ".join(part for part in parts if part)


def _marked(text: str, other: str) -> Content:
    """`text`, with the words that `other` does not have at that place marked."""
    ours, theirs = WORDS.findall(visible(text, keep="\n")), WORDS.findall(visible(other, keep="\n"))
    parts: list[Content] = []
    for kind, start, end, *_ in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        piece = "".join(ours[start:end])
        parts.append(Content(piece) if kind == "equal" else Content.styled(piece, "reverse $mark"))
    return Content.assemble(*parts)


def token_lines(state: ChatState, model: str, width: int) -> list[Content]:
    """The last prompt as the model got it, and its answer's tokens, each coloured by its likelihood."""
    reply = state.exchanges[-1].replies.get(model) if state.exchanges else None
    if reply is None:
        return [Content.styled("no question yet", "$muted")]
    found = [Content.styled("the rendered prompt", "bold")]
    found += _wrapped(Content.styled(visible(reply.prompt, keep="\n"), "$muted"), width)
    found += [Content(""), Content.styled("the answer, by likelihood", "bold"), _legend()]
    found += _wrapped(Content.assemble(*(_token(*piece) for piece in reply.pieces)), width)
    return [*found, *_figures(reply, width)]


def _token(text: str, likelihood: float) -> Content:
    style = next(style for least, style in LIKELIHOODS if likelihood >= least)
    shown = visible(text, keep="\n").replace("\n", "⏎\n")
    return Content.styled(shown, style) if style else Content(shown)


def _legend() -> Content:
    words = [(f" {least:.0%}+ " if least else " less ", style) for least, style in LIKELIHOODS]
    return Content.assemble(*(Content.styled(text, style) if style else Content(text) for text, style in words))


def _figures(reply: Reply, width: int) -> Iterator[Content]:
    """The mean likelihood and the least likely tokens, so that no colour is needed."""
    if not reply.pieces:
        return
    mean = sum(likelihood for _, likelihood in reply.pieces) / len(reply.pieces)
    unlikely = sorted(reply.pieces, key=lambda piece: piece[1])[:MOST_UNLIKELY]
    named = ", ".join(f"{text!r} {likelihood:.0%}" for text, likelihood in unlikely)
    yield from _wrapped(Content.styled(f"mean {mean:.0%}; least likely {visible(named)}", "$muted"), width)


def _wrapped(content: Content, width: int) -> list[Content]:
    return list(content.wrap(max(8, width))) or [Content("")]
