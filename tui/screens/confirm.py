"""A yes-or-no question at the foot of the screen: y or Enter is yes, every other key is no."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import ModalScreen

from tui.widgets.text_lines import TextLines


class ConfirmScreen(ModalScreen[bool]):
    """A modal screen with a yes-or-no question; its result is True for yes, False for no."""

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        """Yield the question with its keys."""
        yield TextLines(id="question")

    def on_resize(self) -> None:
        """Wrap the question at the new width."""
        wrapped = Content.styled(self._question, "bold").wrap(max(10, self.size.width - 2))
        lines = [Content.assemble(" ", line) for line in wrapped]
        keys = Content.assemble((" y", "bold $info"), f" {self._yes}   ", ("any other key", "bold $info"), " no")
        field = self.query_one(TextLines)
        field.styles.height = len(lines) + 1
        field.show([*lines, keys])

    def on_key(self, event: events.Key) -> None:
        """Treat every key as an answer: y and Enter mean yes, all others no."""
        event.stop()
        event.prevent_default()
        self.dismiss(event.key in ("y", "Y", "enter"))
