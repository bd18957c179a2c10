"""Text from files that strangers wrote: made visible before it reaches a screen, and quoted in error messages.

Only functions from text to text live here. Anything that shows a title, a note or a quoted value of a TOML file goes
through `visible` or `quoted`, so no escape code, no line break and no direction override of a file is ever obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""C0 and C1 controls, line separators, bidirectional marks and overrides (Unicode TR 9), surrogates, tag characters."""


def visible(text: str, *, keep: str = "") -> str:
    """The text with every unsafe character written out as an escape; those in `keep` stay."""
    return UNSAFE.sub(lambda hit: hit[0] if hit[0] in keep else _escape(hit[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(value: Any, limit: int = 60) -> str:
    """A TOML value on one line, as a reader would write it, cut at `limit` characters."""
    text = _literal(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{visible(value)}"'
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value[:20]) + "]"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{visible(str(key))} = {_literal(item)}" for key, item in list(value.items())[:20]) + "}"
        )
    return visible(str(value))


def closest_match(word: str, choices: Iterable[str]) -> str | None:
    """The choice a typo of `word` was most likely meant to be, or None."""
    by_folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    folded = word.lower().replace("-", "_")
    matches = get_close_matches(folded, by_folded, n=1, cutoff=0.7)
    return by_folded[matches[0]] if matches else None
