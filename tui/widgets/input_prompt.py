"""A question at the foot of a screen that is answered with a line of text, such as a name or a file to import.

A screen composes one `InputPrompt`, which is hidden until `ask`. Enter answers, Esc cancels.
"""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input

from tui.widgets.key_order import OrderedKeys
from tui.widgets.text_lines import TextLines


class PromptInput(OrderedKeys, Input):
    """The input field of an `InputPrompt`."""

    BINDINGS = [Binding("escape", "cancel", show=False)]  # noqa: RUF012  # Textual's own declaration

    def action_cancel(self) -> None:
        """Close the prompt without an answer."""
        prompt = self.parent
        if isinstance(prompt, InputPrompt):
            prompt.close()


class InputPrompt(Horizontal):
    """A question and an input field at the foot of a screen, hidden until `ask` is called."""

    DEFAULT_CSS = """
    InputPrompt { height: 1; display: none; background: $panel; }
    InputPrompt TextLines { height: 1; color: $info; text-style: bold; }
    InputPrompt PromptInput { width: 1fr; height: 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._answered: Callable[[str], None] | None = None
        self._before: Widget | None = None
        self._allow_empty = False
        self.enter = "keep"
        """What Enter does with the text, in a word for the footer."""

    def compose(self) -> ComposeResult:
        """Yield the question and the field."""
        yield TextLines()
        yield PromptInput(compact=True)

    def ask(
        self, question: str, text: str, answered: Callable[[str], None], *, enter: str = "keep",
        allow_empty: bool = False,
    ) -> None:  # fmt: skip
        """Show the question, with `text` in the field. When Enter is pressed, `answered` is called with the text of the
        field; with an empty one only if `allow_empty`. `enter` says in a word what that does."""
        label, field = self.query_one(TextLines), self.query_one(PromptInput)
        self._before, self._answered, self._allow_empty = self.screen.focused, answered, allow_empty
        self.enter = enter
        label.styles.width = len(question) + 3
        label.show([Content(f" {question}: ")])
        field.value = text
        field.cursor_position = len(text)
        self.display = True
        self.screen.set_focus(field)

    def close(self) -> None:
        """Hide the prompt and return the focus to the widget that had it before."""
        self._answered = None
        self.display = False
        self.screen.set_focus(self._before)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Stop the message about a change, so that the screen does not take it for a change in one of its own
        fields."""
        event.stop()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Pass the answer to the caller of `ask`, unless the answer is empty."""
        event.stop()
        answered, text = self._answered, event.value.strip()
        self.close()
        if answered is not None and (text or self._allow_empty):
            answered(text)
