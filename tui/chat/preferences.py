"""What a thumbs key makes of the answers on the screen: preference pairs, rows for DPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.journal.chats import ChatState, append_rows, preference

PREFERENCES = Path("preferences.jsonl")
"""In the working directory; a data source of the format preference."""


def other_answers(state: ChatState, model: str, shown: Sequence[str]) -> list[str]:
    """The answers to the last question other than the present one of `model`: those of the other columns, and its own
    that were asked for again."""
    exchange = state.exchanges[-1]
    replies = [exchange.replies[name] for name in shown if name != model and name in exchange.replies]
    replies += [earlier[model] for earlier in exchange.earlier if model in earlier]
    own = exchange.replies[model].text
    return list(dict.fromkeys(reply.text for reply in replies if reply.stopped_by and reply.text != own))


def write_pairs(state: ChatState, model: str, shown: Sequence[str], *, better: bool, path: Path = PREFERENCES) -> int:
    """Append a row for each other answer, with that of `model` as the chosen one, or if not `better` as the rejected
    one; returns their number. Raises DataError if the file cannot be written."""
    own = state.exchanges[-1].replies[model].text

    def rows() -> Iterator[dict[str, object]]:
        for other in other_answers(state, model, shown):
            yield preference(state, own, other) if better else preference(state, other, own)

    return append_rows(path, rows())
