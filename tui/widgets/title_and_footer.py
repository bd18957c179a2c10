"""The first and the last line of every screen: the title bar, and the footer with the keys and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from textual.content import Content
from textual.timer import Timer

from tui.keys import EVERYWHERE, Key, key_label
from tui.widgets.text_lines import TextLines, clickable

MESSAGE_SECONDS = 8.0
"""How long a message is shown: long enough to read two lines."""

MESSAGE_LINES = 3
"""Largest number of lines of a message."""


GAP = "   "
"""Between a message and the keys beside it."""

KEYS_CELLS = 40
"""The least room beside a message in which keys are shown: that of the keys that work on every screen, and a few."""


ROOM_FOR_BOTH = 24
"""Rows of a screen from which on the keys stay when a message is shown."""


class TitleBar(TextLines):
    """The first line of a screen: on the left the screen's name and a detail, on the right the screens that a digit key
    opens, with their digits. A click on one opens it."""

    _shown: tuple[str, str, int] | None = None

    def set_title(self, name: str, detail: str, tabs: Sequence[Content]) -> None:
        """Show the screen's name and a detail, and of `tabs`, of which each names the other screens in fewer cells than
        the one before, the first for which there is room; none if there is not room for any."""
        if self._shown == (name, detail, self.size.width):
            return  # as after most keys
        self._shown = (name, detail, self.size.width)
        lefts = [
            Content.assemble((program, "bold $info"), (name, "bold"), (f"  {detail}" if detail else "", "$muted"))
            for program in (" Tunedeck ", " ")
        ]
        for right in tabs:
            for left in lefts:
                gap = self.size.width - left.cell_length - right.cell_length
                if gap > 0:
                    self.show([Content.assemble(left, " " * gap, right)])
                    return
        self.show([lefts[0]])


class FooterBar(TextLines):
    """The last line of a screen: the screen's keys, and a message for some seconds. A click on a key does what the key
    does."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[tuple[Key, bool]] = []
        self._message: Content | None = None
        self._holds: Callable[[], bool] | None = None
        self._timer: Timer | None = None

    def set_keys(self, keys: Sequence[tuple[Key, bool]]) -> None:
        """Show these keys, each with a flag that says whether the key is enabled now; a disabled key is grey. A key
        without a label is not shown."""
        if self._message is not None and self._holds is not None and not self._holds():
            self.clear()
        shown = [(key, usable) for key, usable in keys if key.label]
        if shown != self._keys:
            self._keys = shown
            self._fill()

    def show_message(self, text: str, style: str = "", holds: Callable[[], bool] | None = None) -> None:
        """Show a message for MESSAGE_SECONDS, as plain text without markup, but not longer than `holds` returns
        True."""
        self._message, self._holds = Content.styled(text, style), holds
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(MESSAGE_SECONDS, self.clear)
        self._fill()

    def clear(self) -> None:
        """Remove the message and show the keys again."""
        if self._message is not None:
            self._message = self._holds = None
            self._fill()

    def on_resize(self) -> None:
        """Fit keys or message to the new width."""
        super().on_resize()
        self._fill()

    def _fill(self) -> None:
        width = max(1, self.content_size.width)
        lines = [self._key_line(width)] if self._message is None else self._beside_keys(self._message, width)
        if self.styles.height is None or self.styles.height.value != len(lines):
            self.styles.height = len(lines)
        self.show(lines)

    def _beside_keys(self, message: Content, width: int) -> list[Content]:
        """The lines of a message; a message of one line has the keys beside it for which there is room, or under it on
        a screen with the rows for that."""
        lines = shorten_message(message, width)
        room = width - lines[0].cell_length - len(GAP)
        if len(lines) > 1 or room < KEYS_CELLS:
            return [*lines, self._key_line(width)] if self.screen.size.height >= ROOM_FOR_BOTH else lines
        return [Content.assemble(lines[0], GAP, self._key_line(room))]

    def _key_line(self, width: int) -> Content:
        """A line with as many keys as fit: enabled ones, and where there is room for all of these, disabled ones. Keys
        that work on every screen are always included, at the end."""
        last = [_shown_key(key, usable) for key, usable in self._keys if key.screen == EVERYWHERE]
        room = width - sum(part.cell_length for part in last)
        parts: list[Content] = []
        all_enabled = True
        for key, usable in sorted(self._keys, key=lambda row: not row[1]):
            part = _shown_key(key, usable)
            if key.screen == EVERYWHERE or not (usable or all_enabled):
                continue
            if part.cell_length <= room:
                room -= part.cell_length
                parts.append(part)
            else:
                all_enabled = all_enabled and not usable
        return Content.assemble(*parts, *last)


@cache
def _shown_key(key: Key, usable: bool) -> Content:
    """A key with its words; grey if it is disabled."""
    label, words = ("bold $info", "") if usable else ("$muted", "$muted")
    shown = Content.assemble((key_label(key.keys), label), (f" {key.label}", words))
    screen = "app" if key.screen == EVERYWHERE else "screen"
    return Content.assemble(clickable(shown, f"{screen}.press({key.action!r})"), "  ")


def shorten_message(message: Content, width: int) -> list[Content]:
    """Shorten a message to at most MESSAGE_LINES lines. First the sentences between the first and the last are left
    out, then the end of the first sentence. The last sentence, which tells the user what to do, is never shortened."""
    wrapped = [sentence.wrap(width) for sentence in message.split("\n")]
    while len(wrapped) > 2 and sum(map(len, wrapped)) > MESSAGE_LINES:
        wrapped.pop(-2)
    *first, last = wrapped
    room = max(1, MESSAGE_LINES - len(last))
    kept = [line for lines in first for line in lines]
    if len(kept) > room:
        kept = [*kept[: room - 1], Content.assemble(kept[room - 1].rstrip().truncate(width - 1), "…")]
    return [*kept, *last][:MESSAGE_LINES]
