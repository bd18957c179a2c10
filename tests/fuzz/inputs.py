"""Strategies of hypothesis for files by strangers: documents that are nearly right, and text that means harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

HARM = [
    "", "\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\y", "\x9b2J", "\r\n", "\0", "[red]x[/red]",
    "[@click=quit]x", "\u202egnp", "\u2028", "\ufeff", "../../../etc/passwd", "/etc/shadow", "/dev/zero", "~/x",
    "$HOME", "${SECRET}", "%s%n", "{0.__class__}", "{{ 7*7 }}", "__import__('os').system('id')",
    "$(touch /tmp/owned)", "; rm -rf ~", "`id`", "run:last", "run:../..", "last@../..", "@-1", "file:///etc/passwd",
    "s3://b/k", "zip://x::file:///etc/passwd", "step-00000001", "9" * 50, "1e999", "NaN", "-0", "x" * 3000, "é" * 200,
    "builtin:tiny", "CON", ".", "..", "a/b", "-p",
]  # fmt: skip
"""Escape codes, markup, paths that climb, shell, formats and references."""

texts = st.one_of(st.sampled_from(HARM), st.text(max_size=40))
numbers = st.one_of(
    st.integers(-3, 12), st.integers(), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**39]), st.floats()
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
"""What JSON can hold."""


def _places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, inner in items:
        yield (*place, key)
        yield from _places(inner, (*place, key))


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a JSON document, in which up to three places are replaced, removed or added to."""
    copy = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(copy))
        if not places:
            return draw(values)
        *way, last = draw(st.sampled_from(places))
        owner = copy
        for key in way:
            owner = owner[key]
        what = draw(st.integers(0, 3))
        if what == 0:
            del owner[last]
        elif what == 1 and isinstance(owner, dict):
            owner[draw(texts)] = draw(values)
        else:
            owner[last] = draw(values)
    return copy


@st.composite
def spliced(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes of which up to three pieces are cut out, doubled or replaced by harm, brackets or other bytes."""
    found = whole
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(found)))
        stop = draw(st.integers(start, min(len(found), start + 40)))
        harm = st.sampled_from([text.encode() for text in HARM])
        brackets = st.sampled_from([b"[" * 200, b'{"a":' * 200, b"]" * 200, b'"', b"\\", b"\n", b"\xff\xfe", b"\xc3"])
        middle = draw(st.one_of(harm, brackets, st.binary(max_size=12), st.just(found[start:stop] * 2)))
        found = found[:start] + middle + found[stop:]
    return found


def as_json(document: Any) -> bytes:
    """As a careless program writes it: with NaN and lone surrogates."""
    return json.dumps(document).encode()


def json_files(document: Any) -> st.SearchStrategy[bytes]:
    """Files that are nearly this document."""
    whole = as_json(document)
    return st.one_of(damaged(document).map(as_json), spliced(whole), values.map(as_json), st.binary(max_size=60))
