"""The first and the last line of every screen: where one is, and which keys there are or what was just said."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.timer import Timer

from tui.keys import EVERYWHERE, Key, shown
from tui.widgets.text_lines import Lines

SAID_SECONDS = 8.0
"""How long a message stays: long enough to read two lines."""

SAID_LINES = 3
"""Lines that a message may take."""


class TitleLine(Lines):
    """The screen's name on the left, what it is about in the middle, the other screens on the right."""

    def put(self, lefts: Sequence[Content], right: Content) -> None:
        """Show the first left one that leaves room for the right one; where none does, the first alone."""
        gaps = [self.size.width - left.cell_length - right.cell_length for left in lefts]
        fitting = (Content.assemble(left, " " * gap, right) for left, gap in zip(lefts, gaps, strict=True) if gap > 0)
        self.show([next(fitting, lefts[0])])


class FooterLine(Lines):
    """The keys of the screen, or for a while a message in their place."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[tuple[Key, bool]] = []
        self._said: Content | None = None
        self._timer: Timer | None = None

    def put(self, keys: Sequence[tuple[Key, bool]]) -> None:
        """Offer these keys; False marks one that can do nothing now."""
        self._keys = [(key, usable) for key, usable in keys if key.label]
        self._fill()

    def say(self, text: str, style: str = "") -> None:
        """Show a message for a while. Plain text: nothing in it is read as markup."""
        self._said = Content.styled(text, style)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(SAID_SECONDS, self.clear)
        self._fill()

    def clear(self) -> None:
        """Back to the keys."""
        self._said = None
        self._fill()

    def on_resize(self) -> None:
        """Other keys fit."""
        super().on_resize()
        self._fill()

    def _fill(self) -> None:
        width = max(1, self.content_size.width)
        lines = [self._key_line(width)] if self._said is None else in_few_lines(self._said, width)
        if self.styles.height is None or self.styles.height.value != len(lines):
            self.styles.height = len(lines)
        self.show(lines)

    def _key_line(self, width: int) -> Content:
        """As many keys as fit, usable ones first. Those that hold everywhere come last and always: the way out."""
        last = [self._one(key, usable) for key, usable in self._keys if key.where == EVERYWHERE]
        room = width - sum(part.cell_length for part in last)
        parts: list[Content] = []
        for key, usable in sorted(self._keys, key=lambda row: not row[1]):
            part = self._one(key, usable)
            if key.where != EVERYWHERE and part.cell_length <= room:
                room -= part.cell_length
                parts.append(part)
        return Content.assemble(*parts, *last)

    @staticmethod
    def _one(key: Key, usable: bool) -> Content:
        return Content.assemble(
            (shown(key.keys), "bold $info" if usable else "$muted"), (f" {key.label}  ", "" if usable else "$muted")
        )


def in_few_lines(said: Content, width: int) -> list[Content]:
    """A message in SAID_LINES: where it has more, what is between its first and last sentence goes, then the end of the
    first; the last is what to do about it."""
    wrapped = [sentence.wrap(width) for sentence in said.split("\n")]
    while len(wrapped) > 2 and sum(map(len, wrapped)) > SAID_LINES:
        wrapped.pop(-2)
    *first, last = wrapped
    room = max(1, SAID_LINES - len(last))
    kept = [line for lines in first for line in lines]
    if len(kept) > room:
        kept = [*kept[: room - 1], Content.assemble(kept[room - 1].rstrip().truncate(width - 1), "…")]
    return [*kept, *last][:SAID_LINES]
