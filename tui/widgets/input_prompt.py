"""A question at the foot of a screen, answered with a line of text: a name to save under, a file to import.

The screen places one `Prompt`; `ask` shows it. Enter answers, Esc withdraws the question.
"""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input

from tui.widgets.key_order import KeysInOrder
from tui.widgets.text_lines import Lines


class Answer(KeysInOrder, Input):
    """The field; Esc belongs to the question, not to the screen."""

    BINDINGS = [Binding("escape", "withdraw", show=False)]  # noqa: RUF012  # Textual's own declaration

    def action_withdraw(self) -> None:
        """No answer."""
        prompt = self.parent
        if isinstance(prompt, Prompt):
            prompt.close()


class Prompt(Horizontal):
    """The question and the field, hidden until something is asked."""

    DEFAULT_CSS = """
    Prompt { height: 1; display: none; background: $panel; }
    Prompt Lines { height: 1; color: $info; text-style: bold; }
    Prompt Answer { width: 1fr; height: 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._answered: Callable[[str], None] | None = None
        self._before: Widget | None = None

    def compose(self) -> ComposeResult:
        """The question, then the field."""
        yield Lines()
        yield Answer(compact=True)

    def ask(self, question: str, text: str, answered: Callable[[str], None]) -> None:
        """Ask, with `text` to start from; `answered` gets what Enter was pressed on."""
        label, field = self.query_one(Lines), self.query_one(Answer)
        self._before, self._answered = self.screen.focused, answered
        label.styles.width = len(question) + 3
        label.show([Content(f" {question}: ")])
        field.value = text
        field.cursor_position = len(text)
        self.display = True
        self.screen.set_focus(field)

    def close(self) -> None:
        """Hide it and go back to where the focus was."""
        self._answered = None
        self.display = False
        if self._before is not None:
            self.screen.set_focus(self._before)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Nobody else's affair."""
        event.stop()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answered."""
        event.stop()
        answered, text = self._answered, event.value.strip()
        self.close()
        if answered is not None and text:
            answered(text)
