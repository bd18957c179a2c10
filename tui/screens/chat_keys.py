"""The keys of an open chat: they ask its process for something, save what was said, or change what is shown.

Try: esc in the field of a chat, then `?`
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import DataError
from engine.journal.chats import ChatState, append_rows, conversations
from engine.journal.event_text import clean
from tui.chat.choices import ChatTargets
from tui.chat.column import ChatColumn
from tui.chat.preferences import PREFERENCES, other_answers, write_pairs
from tui.screens.base import BaseScreen
from tui.widgets.input_prompt import InputPrompt

CONVERSATIONS = "conversations.jsonl"

STEPS = {"warmer": ("temperature", 0.1), "colder": ("temperature", -0.1), "wider": ("top_p", 0.05),
         "narrower": ("top_p", -0.05), "reseed": ("seed", 1)}  # fmt: skip
"""What the sampling keys change, and by how much."""


class ChatKeys(BaseScreen):
    """Base class of the Chat screen with these keys."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ChatState()
        self.targets: tuple[str, ...] = ()
        """The models that the chat was begun with; empty for one that was taken up."""
        self.wanted: dict[str, float] = {}
        """Settings that the process was asked for and has not confirmed: keys are pressed faster than it answers."""
        self.images: list[str] = []
        """Paths to show with the next question."""
        self.front = 0
        """The column on which keys act."""
        self.view = "text"
        """text, difference or tokens."""
        self.shows_base = False

    @property
    def columns(self) -> list[str]:
        """The models that are shown, in order."""
        raise NotImplementedError

    def paint(self) -> None:
        """Paint what has changed."""
        raise NotImplementedError

    def send(self, name: str, **fields: Any) -> None:
        """Send a request to the chat's process."""
        raise NotImplementedError

    def begin(self, targets: ChatTargets) -> None:
        """Begin a chat with these models."""
        raise NotImplementedError

    def do_again(self) -> None:
        """Answer the last question again, with other random numbers."""
        self.send("again")
        if not self.settings().get("temperature"):
            self.show_message("greedy answers do not change; > turns on sampling")

    def do_undo(self) -> None:
        """Forget the last question and its answers."""
        self.send("undo")

    def do_base(self) -> None:
        """Show the base's answer to the last question in a column of its own; again: hide it."""
        self.shows_base = not self.shows_base
        if self.shows_base and self.state.base not in self.state.exchanges[-1].replies:
            self.send("base")
        self.paint()

    def do_difference(self) -> None:
        """Mark the words that differ between the columns; again: none."""
        self._set_view("difference")

    def do_tokens(self) -> None:
        """Show the rendered prompt, and the answer's tokens coloured by likelihood; again: the conversation."""
        self._set_view("tokens")

    def _set_view(self, view: str) -> None:
        self.view = "text" if self.view == view else view
        self.paint()

    def do_next_column(self) -> None:
        """Let keys act on the next column."""
        self.front = (self.front + 1) % len(self.columns)
        self.paint()

    def do_previous_column(self) -> None:
        """Let keys act on the column before."""
        self.front = (self.front - 1) % len(self.columns)
        self.paint()

    def do_prefer(self) -> None:
        """Write the front column's answer as the chosen one, beside each other answer."""
        self._rate(better=True)

    def do_reject(self) -> None:
        """Write the front column's answer as the rejected one, beside each other answer."""
        self._rate(better=False)

    def _rate(self, *, better: bool) -> None:
        model = self.columns[self.front]
        try:
            count = write_pairs(self.state, model, self.columns, better=better)
        except DataError as error:
            self.show_error(error)
            return
        side = "chosen" if better else "rejected"
        self.show_message(f"{clean(model)} {side}: {count} pair{'s' * (count != 1)} added to {PREFERENCES}")

    def do_system(self) -> None:
        """Ask for another system prompt."""
        self.query_one(InputPrompt).ask("system prompt", self.state.system or "", partial(self._send_text, "system"))

    def _send_text(self, name: str, text: str) -> None:
        self.send(name, text=text)

    def do_image(self) -> None:
        """Ask for a picture to show with the next question."""
        self.query_one(InputPrompt).ask("picture for the next question", "", self.add_image, enter="add")

    def add_image(self, path: str) -> None:
        full = Path(path).expanduser().absolute()
        if not self.state.takes_images:
            self.show_message("these models do not support images", "$caution")
        elif not full.is_file():
            self.show_message(f"there is no file {clean(full)}", "$caution")
        else:
            self.images.append(str(full))
            self.paint()

    def do_save(self) -> None:
        """Ask for a file, and append the conversation to it."""
        self.query_one(InputPrompt).ask("append to", CONVERSATIONS, self.save, enter="save")

    def save(self, name: str) -> None:
        try:
            count = append_rows(Path(name).expanduser(), conversations(self.state))
        except DataError as error:
            self.show_error(error)
            return
        self.show_message(
            f'{count} saved to {name}, a data source with format = "chat"' if count else "nothing to save"
        )

    def do_models(self) -> None:
        """Ask for the models of a new chat, side by side."""
        names = " ".join(self.targets or self.state.models)
        self.query_one(InputPrompt).ask("models (RUN RUN@STEP RUN@best)", names, self._begin_named, enter="begin")

    def _begin_named(self, text: str) -> None:
        self.send("end")
        self.begin(ChatTargets(tuple(text.split())))

    def _change(self, action: str) -> None:
        key, by = STEPS[action]
        value = self.settings().get(key)
        if isinstance(value, int | float):
            new = value + by
            new = int(new) if key == "seed" else round(max(0.0 if key == "temperature" else 0.05, new), 2)
            new = min(1.0, new) if key == "top_p" else new
            self.wanted[key] = new
            self.send("set", settings={key: new})

    def settings(self) -> dict[str, Any]:
        """The sampling settings that the next answer will have."""
        return self.state.settings | self.wanted

    def forget_confirmed(self) -> None:
        confirmed = self.state.settings
        self.wanted = {key: value for key, value in self.wanted.items() if confirmed.get(key) != value}

    def do_warmer(self) -> None:
        """Raise the temperature."""
        self._change("warmer")

    def do_colder(self) -> None:
        """Lower the temperature; at 0 answers are greedy."""
        self._change("colder")

    def do_wider(self) -> None:
        """Raise top_p."""
        self._change("wider")

    def do_narrower(self) -> None:
        """Lower top_p."""
        self._change("narrower")

    def do_reseed(self) -> None:
        """Take the next seed."""
        self._change("reseed")

    def _scroll(self, lines: int) -> None:
        for column in self.query(ChatColumn):
            column.scroll_lines(lines)

    def _page(self) -> int:
        return max(1, self.query_one("#columns").size.height - 2)

    def do_older(self) -> None:
        """Scroll up."""
        self._scroll(1)

    def do_newer(self) -> None:
        """Scroll down."""
        self._scroll(-1)

    def do_page_older(self) -> None:
        """Scroll a page up."""
        self._scroll(self._page())

    def do_page_newer(self) -> None:
        """Scroll a page down."""
        self._scroll(-self._page())

    def do_newest(self) -> None:
        """Go to the newest line."""
        for column in self.query(ChatColumn):
            column.follow()

    def other_answers(self) -> list[str]:
        model = self.columns[self.front]
        reply = self.state.exchanges[-1].replies.get(model)
        return other_answers(self.state, model, self.columns) if reply is not None and reply.stopped_by else []
