"""Makes text from untrusted files safe: what shows a title, a note or a value of a TOML file passes it through
`visible` or `quoted`, so that no escape code, line break or direction override takes effect."""

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
    """Replace every unsafe character by an escape such as \\x1b, except the characters in `keep`."""
    return UNSAFE.sub(lambda hit: hit[0] if hit[0] in keep else _escape(hit[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(value: Any, limit: int = 60) -> str:
    """A TOML value on one line as in a file, without unsafe characters, cut at `limit` characters."""
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
    """The choice whose spelling is closest; None if none is similar."""
    by_folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    folded = word.lower().replace("-", "_")
    matches = get_close_matches(folded, by_folded, n=1, cutoff=0.7)
    return by_folded[matches[0]] if matches else None
