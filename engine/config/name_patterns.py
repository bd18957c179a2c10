"""Matches a recipe's patterns with the dotted names of modules and parameters.

`*` matches within one part of a dotted name, `**` also across dots, `?` and `[...]` match one character. A pattern may
also name a module, which stands for all its parameters.

A pattern comes from a recipe, perhaps somebody else's, and a regular expression of many stars takes years on one name.
So all states that a pattern can be in are followed at once, as bits of a number: a name takes time in proportion to its
length. Names of a model consist of few different parts, so what a part does to the states is kept.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from engine.config.files.text import visible
from engine.errors import UsageError

BY_LAST_PARTS = ("method.targets", "method.exclude")
"""Keys whose patterns may name the last parts of a module."""

SHOWN_CHARACTERS = 100
"""Of a pattern in a message."""

ANYWHERE = "**."
"""At the start of a pattern it also stands for nothing: "**.lm_head" is the head of any model."""

WILD = frozenset("*?[")

PARTS = ("vision", "projector", "language")
"""Words of method.freeze that name a part of the model, not a name in it."""

LONGEST = 2_000
"""Characters of a pattern; a longer one matches nothing."""

MOST_KEPT, KEPT_BITS = 10_000, 1 << 26
"""Steps of one set of patterns that are kept, and the bits of their states together."""

PIECE = re.compile(r"\*+|\[[^\]]+\]|.", re.DOTALL)
"""Stars, a class of characters, or one character."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name`, or a module that contains it."""
    if WILD.isdisjoint(pattern):
        return name.startswith(pattern) and name[len(pattern) : len(pattern) + 1] in ("", ".")
    return compile_patterns((pattern,)).matches(name)


def matches_end(pattern: str, name: str) -> bool:
    """As `matches`, or the last parts of either ("q_proj"), as the targets of adapters may."""
    if WILD.isdisjoint(pattern):
        return matches(pattern, name) or name.endswith("." + pattern)
    return matches(pattern, name) or compile_pattern("**." + pattern).matches(name)


def no_match(pattern: str, names: Sequence[str], key: str) -> UsageError:
    """The error for a pattern of the recipe key `key` that matches none of `names`; it suggests a similar one that
    does."""
    shown = pattern if len(pattern) <= SHOWN_CHARACTERS else pattern[:SHOWN_CHARACTERS] + "…"
    words = list(dict.fromkeys([part for name in names for part in name.split(".") if not part.isdecimal()]))
    bare = pattern[:SHOWN_CHARACTERS].replace("*", "").strip(".")
    near = difflib.get_close_matches(bare, [*words, *names], n=1, cutoff=0.6)
    test = matches_end if key in BY_LAST_PARTS else matches
    near = [word if any(test(word, name) for name in names) else f"**.{word}" for word in near]
    examples = near or list(dict.fromkeys(name.rpartition(".")[2] for name in names))[:3]
    return UsageError(
        f"{key}: {visible(repr(shown))} does not match a name in this model",
        expected='a glob for dotted names ("**" also matches dots), such as ' + ", ".join(examples),
        fix=f"did you mean {near[0]!r}?" if near else "correct the pattern, or remove it",
    )


def layer_of(name: str) -> int | None:
    """The number of the layer that a dotted name is in; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def require_layers(wanted: Iterable[int], names: Iterable[str]) -> None:
    """Raise UsageError for a number of method.layers in which none of `names` is."""
    numbers = {number for name in names if (number := layer_of(name)) is not None}
    if missing := sorted(set(wanted) - numbers):
        raise UsageError(
            f"method.layers: no target is in layer {missing[0]}",
            expected=f"numbers of layers with targets, {min(numbers)} to {max(numbers)}"
            if numbers
            else "targets in layers",
            fix=f"take {missing[0]} out of method.layers",
        )


def nothing_learns() -> UsageError:
    """The error for patterns of [method] that leave nothing to train."""
    return UsageError(
        "the patterns of [method] leave nothing to train: method.freeze matches everything that would be trained",
        expected="at least one trainable parameter or adapter",
        fix="remove a pattern from method.freeze",
    )


def require_trained_matches(patterns: Sequence[str], names: Iterable[str], frozen: Collection[str], key: str) -> None:
    """Raise UsageError for a pattern of `key` all of whose matches among `names` are `frozen`."""
    kept = [name for name in names if name not in frozen] if frozen else []
    for pattern in patterns if frozen else ():
        if not any(matches(pattern, name) for name in kept):
            raise UsageError(
                f"{key}: {visible(repr(pattern[:SHOWN_CHARACTERS]))} names only what method.freeze freezes",
                expected=f"patterns of method.freeze that leave something of what {key} names",
                fix="take the pattern out of one of the two",
            )


def no_such_part(part: str) -> UsageError:
    """The error for a word of method.freeze that names a part which the model does not have."""
    return UsageError(
        f'method.freeze: "{part}" names a part of models with images, and this model does not have it',
        expected='"vision", "projector" or "language" of a model that has them, or a glob on dotted names',
        fix=f'take "{part}" out of method.freeze',
    )


@lru_cache(maxsize=256)
def compile_patterns(patterns: tuple[str, ...]) -> Patterns:
    """A test that accepts every name that a glob matches, or that lies inside a matched module."""
    return Patterns(patterns, inside=True)


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Patterns:
    """A test that accepts exactly the names that the glob matches."""
    return Patterns((pattern,), inside=False)


class Patterns:
    """Globs as one automaton: bit i of a state says that the pieces before piece i have matched."""

    def __init__(self, patterns: Sequence[str], *, inside: bool) -> None:
        """Compile the globs. With `inside`, a name also matches where a glob matches a module that contains it."""
        self._inside = inside
        first: list[int] = []
        ends: list[int] = []
        stars: list[int] = []
        deep_stars: list[int] = []
        pieces: dict[str, list[int]] = {}
        place = 0
        at_the_top = [pattern.removeprefix(ANYWHERE) for pattern in patterns if pattern.startswith(ANYWHERE)]
        for pattern in (*patterns, *at_the_top):
            if len(pattern) > LONGEST:
                continue
            first.append(place)
            for piece in PIECE.findall(pattern):
                if piece[0] == "*":
                    stars.append(place)
                    deep_stars += [place] if len(piece) > 1 else []
                else:
                    pieces.setdefault(piece, []).append(place)
                place += 1
            ends.append(place)
            place += 1
        self._ends, self._stars, self._deep_stars = _bits(ends), _bits(stars), _bits(deep_stars)
        self._pieces = {piece: _bits(places) for piece, places in pieces.items()}
        self._classes = [piece for piece in pieces if piece == "?" or len(piece) > 1]
        self._first = _bits(first)
        self._first |= (self._first & self._stars) << 1
        self._masks: dict[str, int] = {}
        self._steps: dict[tuple[int, str], int] = {}
        self._most_kept = min(MOST_KEPT, KEPT_BITS // (place + 1))

    def matches(self, name: str) -> bool:
        """Whether a glob matches the whole of `name`, or a module that contains it."""
        state, steps = self._first, self._steps
        for number, part in enumerate(name.split(".")):
            if number:
                if self._inside and state & self._ends:
                    return True
                part = "." + part
            after = steps.get((state, part))
            state = self._step(state, part) if after is None else after
            if not state:
                return False
        return bool(state & self._ends)

    def _step(self, state: int, part: str) -> int:
        """The state after the characters of `part`."""
        start = state
        for character in part:
            mask = self._masks.get(character)
            if mask is None:
                mask = self._mask(character)
            state = ((state & mask) << 1) | (state & (self._deep_stars if character == "." else self._stars))
            state |= (state & self._stars) << 1
        if len(self._steps) >= self._most_kept:
            self._steps.clear()
        self._steps[start, part] = state
        return state

    def _mask(self, character: str) -> int:
        """The bits of the pieces that match a character, stars left out."""
        mask = self._pieces.get(character, 0) if character != "?" else 0
        for piece in self._classes:
            mask |= self._pieces[piece] if _in_class(character, piece) else 0
        if len(self._masks) < self._most_kept:
            self._masks[character] = mask
        return mask


def _bits(places: Sequence[int]) -> int:
    """The number that has these bits, in ascending order."""
    octets = bytearray(places[-1] // 8 + 1 if places else 0)
    for place in places:
        octets[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(octets, "little")


def _in_class(character: str, piece: str) -> bool:
    """Whether `?` or a class such as [0-9] or [!a-c] matches a character."""
    if piece == "?":
        return character != "."
    negated = piece[1] in "!^" and len(piece) > 3
    listed, found, place = piece[2 if negated else 1 : -1], False, 0
    while place < len(listed) and not found:
        is_range = listed[place + 1 : place + 2] == "-" and place + 2 < len(listed)
        last = place + 2 if is_range else place
        found = listed[place] <= character <= listed[last]
        place = last + 1
    return found is not negated
