"""A widget of text lines that repaints only what changed: the base of most widgets of the console.

`TextLines` draws one `Content` per line and stores the drawn lines; given new lines, it repaints only those that
changed, each up to its last changed cell. It never requests a layout pass, does not wrap lines and does not parse
markup; the caller makes the lines. A run that is watched at 120x36 repaints most of its screen twice a second. With
Textual's `Static` these repaints took several per cent of a core, because each update of a `Static` causes a layout
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from tui.theme import glyphs

BLANK = Content("")


def clickable(content: Content, action: str) -> Content:
    """Return `content` such that a click on it runs a Textual action, such as "screen.press('start')"."""
    return content.stylize(Style.from_meta({"@click": action}))


def changed_cells(old: Strip, new: Strip) -> int:
    """How many cells from the left contain all differences of two strips of the same width."""
    before, after, cells = list(old), list(new), new.cell_length
    while before and after and before[-1] == after[-1]:
        before.pop()
        cells -= after.pop().cell_length
    if before and after and before[-1].style == after[-1].style:
        pairs = zip(reversed(before[-1].text), reversed(after[-1].text), strict=False)
        cells -= cell_len("".join(now for _, now in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return cells


class TextLines(Widget):
    """A widget that draws lines of text from the top; lines wider than the widget are cut."""

    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: Sequence[Content] = []
        self._strips: dict[int, Strip] = {}

    def show(self, lines: Sequence[Content]) -> None:
        """Replace the lines by these, and repaint those that changed."""
        before, self._lines = self._lines, list(lines)
        for y in range(max(len(before), len(self._lines))):
            old = before[y] if y < len(before) else BLANK
            new = self._lines[y] if y < len(self._lines) else BLANK
            if not old.is_same(new):
                self.redraw_changes(y)

    @property
    def text(self) -> str:
        """The shown lines as plain text."""
        return "\n".join(line.plain for line in self._lines)

    def redraw(self, y: int) -> None:
        """Draw line `y` again."""
        self._strips.pop(y, None)
        if 0 <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def redraw_changes(self, y: int) -> None:
        """Draw line `y` again after its content changed, and repaint it up to the last cell that differs: Textual sends
        a line from the widget's first cell on."""
        old = self._strips.get(y)
        if old is None or not 0 <= y < self.size.height or old.cell_length != self.size.width:
            self.redraw(y)
            return
        self._strips[y] = new = self._draw(y)
        if cells := changed_cells(old, new):
            self.refresh(Region(0, y, cells, 1))

    def redraw_all(self) -> None:
        """Draw every line again."""
        self._strips.clear()
        self.refresh()

    def line_at(self, y: int) -> Content:
        """The content to draw on the widget's line `y`."""
        return self._lines[y] if y < len(self._lines) else BLANK

    def line_style(self, y: int) -> Style:
        """Return the base style of line `y`, the widget's own; subclasses return others, such as that of a cursor."""
        return self.visual_style

    def render_line(self, y: int) -> Strip:
        """Return the strip of line `y` to Textual; the line is drawn only if no drawn strip is stored."""
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._draw(y)
        return strip

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the stored strips to Textual if the widget has neither borders nor filters. Textual's own method would
        compute the colours of all ancestors of every visible widget whenever any widget changes, which takes half the
        time of a repaint."""
        if self.styles.gutter or self.get_line_filters() or crop.column_span != (0, self.size.width):
            return super().render_lines(crop)
        return [self.render_line(y) for y in crop.line_range]

    def _draw(self, y: int) -> Strip:
        style, width = self.line_style(y), self.content_size.width
        content = self.line_at(y)
        if content.cell_length > width:
            content = Content.assemble(content.truncate(max(0, width - 1)), self._cut)
        if self._cut != "…" and "…" in content.plain:  # of a cell that was cut before
            content = Content(content.plain.replace("…", self._cut), list(content.spans))
        return Strip(content.render_segments(style)).adjust_cell_length(width, style.rich_style)

    @property
    def _cut(self) -> str:
        """The character that ends a line that was cut: an ellipsis, or its ASCII form."""
        return glyphs("…", ascii_only=getattr(self.app, "ascii_only", False))

    def on_resize(self) -> None:
        """Draw every line again for the new width."""
        self._strips.clear()

    def notify_style_update(self) -> None:
        """Draw every line again if the theme or the focus changes the widget's colours."""
        super().notify_style_update()
        self._strips.clear()
