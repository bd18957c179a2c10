"""Chat: a conversation with one model, or with several side by side; also a list of chats and runs to begin with.

The models answer in a separate process (`engine.extras.chat.server`), which this screen starts and controls through
files in the chat's folder. Leaving the screen leaves it running, leaving the console ends it (`tui.app.run`); Enter in
the list goes on with it.

Try: `tunedeck`, then `A` on a run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input

from engine.errors import TunedeckError
from engine.journal.chats import ChatState, is_answering, send_request
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.events import EventTail
from engine.launch.other_processes import begin_chat, reap_chats, take_up_chat
from engine.launch.process import log_tail
from tui.chat.choices import ChatTargets, Choice, choices
from tui.chat.column import ChatColumn
from tui.chat.lines import conversation_lines, token_lines
from tui.keys import Key, bindings
from tui.screens.chat_keys import CONVERSATIONS, ChatKeys
from tui.theme import SPACE
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.key_order import OrderedKeys
from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines

POLL_SECONDS, BUSY_SECONDS = 0.5, 0.1
"""Intervals at which events are read: while nothing is answered, and while a model loads or answers."""

QUESTION = "a question, or /help"
PLAIN_QUESTION = f"plain text as in the training data, including a final space ({SPACE} in answers); or /help"

OPEN_ACTIONS = ("base", "difference", "tokens", "again", "undo", "prefer", "reject", "system", "save", "image",
                "warmer", "colder", "wider", "narrower", "reseed", "end", "stop", "next_column", "previous_column",
                "models")  # fmt: skip
"""Actions that need an open chat."""


WHILE_TYPING = [
    Key("chat", "enter", "send_typed", "send", "send the input"),
    Key("chat", "escape", "leave_field", "keys", "leave the field; letters are keys then"),
    Key("chat", "tab", "next_column", "column", "the next column"),
    Key("chat", "ctrl+c", "stop", "stop", "stop the current answer; if there is none, end the chat"),
]
"""The keys that are not letters of the question being typed."""

IN_LIST = [Key("chat", "enter", "open", "open", "continue this chat, or start one with this run")]
"""The keys of the list of chats and runs, beside those that move its cursor."""


class ChatField(OrderedKeys, Input):
    """The field in which questions are typed."""

    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        Binding("escape", "screen.press('leave_field')", show=False),
        Binding("ctrl+c", "screen.press('stop')", show=False),
        Binding("pageup", "screen.press('page_older')", show=False),
        Binding("pagedown", "screen.press('page_newer')", show=False),
        Binding("tab", "screen.press('next_column')", show=False),
    ]


class ChatScreen(ChatKeys):
    """The screen that shows a chat, and before that the list of what can be talked to."""

    screen_name = "chat"
    BINDINGS = bindings("chat")
    AUTO_FOCUS = ""

    def __init__(self) -> None:
        super().__init__()
        self.directory: RunDirectory | None = None
        self._pending: ChatTargets | None = None
        self._tail = EventTail(Path())
        self._told = 0
        """Notes of the process that were shown."""
        self._offered: list[Choice] = []
        self._sent: list[str] = []
        """Questions that the process has not taken yet."""

    def set_argument(self, argument: object) -> None:
        """Take models to begin a chat with; None shows the chat that is open, or the list."""
        self._pending = argument if isinstance(argument, ChatTargets) else None

    def compose_body(self) -> ComposeResult:
        """Yield the list, the columns, the status, the prompt of some keys and the field."""
        yield RowList(id="chats")
        with Vertical(id="talk"):
            yield Horizontal(id="columns")
            yield TextLines(id="sampling", classes="heading")
            yield InputPrompt()
            yield ChatField(placeholder=QUESTION, id="question", compact=True)

    def on_screen_resume(self) -> None:
        """Begin the chat that was asked for, and show what is open."""
        super().on_screen_resume()
        if self._pending is not None:
            targets, self._pending = self._pending, None
            self.begin(targets)
        self._arrange()

    def begin(self, targets: ChatTargets) -> None:
        try:
            runs = str(self.console.runs_dir)
            asked = {"targets": list(targets.names), "recipe": targets.recipe or None, "runs": runs}
            directory = begin_chat(self.console.runs_dir, asked)
        except (TunedeckError, OSError) as error:
            self._show_problem(error)
            return
        self.targets = targets.names
        self._open(directory)

    def _open(self, directory: RunDirectory) -> None:
        self.directory, self.state, self._tail = directory, ChatState(), EventTail(directory.events)
        self.query_one("#question", ChatField).placeholder = QUESTION
        self._told, self.front, self.view, self.shows_base = 0, 0, "text", False
        self.images, self._sent, self.wanted = [], [], {}
        self._read()
        self._arrange()
        self.do_type()

    def _show_problem(self, error: Exception) -> None:
        if isinstance(error, TunedeckError):
            self.show_error(error)
        else:
            self.show_message(str(error), "bold $bad")

    def poll(self) -> float:
        """Read new events and paint what changed; returns the seconds until the next reading."""
        reap_chats()
        if self.directory is None:
            self._list()
            return POLL_SECONDS
        if self._read():
            self.paint()
        return BUSY_SECONDS if self.state.status in ("loading", "answering") else POLL_SECONDS

    def _read(self) -> bool:
        if self.directory is None:
            return False
        alive = is_answering(self.directory)
        before = len(self.state.exchanges)
        changed = self.state.add(self._tail.poll())
        self.forget_confirmed()
        del self._sent[: max(0, len(self.state.exchanges) - before)]
        if not alive and not changed and self.state.status != "ended":
            self.wanted = {}
            self.state.status, self.state.error = "ended", (log_tail(self.directory, lines=1) or [""])[0]
            changed = True
        for note in self.state.notes[self._told :]:
            self.show_message(note, "$caution")
        self._told = len(self.state.notes)
        self._tell_plain()
        return changed

    @property
    def columns(self) -> list[str]:
        """The models that are shown, in order."""
        names = self.state.models or [clean(Path(target).name) for target in self.targets] or ["loading"]
        return [*names, self.state.base] if self.shows_base and self.state.base else names

    def _arrange(self) -> None:
        """Show the list or the chat, with as many columns as it has."""
        is_open = self.directory is not None
        self.query_one("#chats").display = not is_open
        self.query_one("#talk").display = is_open
        if not is_open:
            self._list()
            self.set_focus(self.query_one("#chats", RowList))
        self.call_after_refresh(self.paint)

    def _list(self) -> None:
        self._offered = choices(self.console.runs_dir)
        empty = [
            Content.styled("  no run has a result or a checkpoint yet", "$muted"),
            Content.styled("  2 starts a run; A in the Library (3) starts a chat with the model of a recipe", "$muted"),
        ]
        self.query_one("#chats", RowList).show([choice.line for choice in self._offered] or empty)

    def paint(self) -> None:
        if self.directory is None or not self.is_mounted:
            self.refresh_title_and_footer()
            return
        names, box = self.columns, self.query_one("#columns")
        columns = list(box.query(ChatColumn))
        if len(columns) < len(names):
            box.mount_all([ChatColumn() for _ in names[len(columns) :]])
            self.call_after_refresh(self.paint)
            return
        self.front = min(self.front, len(names) - 1)
        one = self.has_class("-one-pane")
        for number, column in enumerate(columns):
            column.display = number < len(names) and (not one or number == self.front)
            if column.display:
                column.set_lines(*self._column(number, names, column.content_size.width or self.size.width))
        self.query_one("#sampling", TextLines).show([self._sampling()])
        self.refresh_title_and_footer()

    def _column(self, number: int, names: list[str], width: int) -> tuple[Content, list[Content]]:
        name, several = names[number], len(names) > 1
        heading = Content.styled(f" {clean(name)} ", "bold reverse" if several and number == self.front else "bold")
        more = [*self._loading_lines(), *(Content.styled(f"> {clean(text)}", "$muted") for text in self._sent)]
        if self.view == "tokens":
            return heading, [*token_lines(self.state, name, width), *more]
        against = names[1 if number == 0 else 0] if self.view == "difference" and several else ""
        return heading, [*conversation_lines(self.state, name, width, against), *more]

    def _loading_lines(self) -> list[Content]:
        """What the process says while it loads, or why it ended."""
        if self.state.status == "loading":
            return [Content.styled(clean(note), "$muted") for note in self.state.notes] or [Content("loading")]
        if self.state.status != "ended":
            return []
        lines = (self.state.error or "the chat's process has ended").splitlines()
        again = Content.styled("a question restarts it with the conversation", "$muted")
        return [*(Content.styled(clean(line), "$caution") for line in lines), again]

    def _tell_plain(self) -> None:
        """Say in the empty field how a model of plain text is asked."""
        if self.state.plain:
            self.query_one("#question", ChatField).placeholder = PLAIN_QUESTION

    def _sampling(self) -> Content:
        settings = self.settings()
        parts = [f"{key} {settings[key]:g}" for key in ("temperature", "top_p", "max_new_tokens", "seed")
                 if isinstance(settings.get(key), int | float)]  # fmt: skip
        parts += [f"image {path}" for path in self.images]
        parts += [f"system: {self.state.system}"] if self.state.system else []
        return Content.styled(f" {self.state.status}  " + "  ".join(map(clean, parts)), "$muted")

    def title_detail(self) -> str:
        """The models, or that nothing is open."""
        return ", ".join(map(clean, self.columns)) if self.directory is not None else "choose a chat or a run"

    def footer_rows(self) -> list[Key]:
        """The keys that work now: in the field all others are letters, and in the list no chat is open."""
        if self.directory is not None and isinstance(self.focused, ChatField):
            return WHILE_TYPING
        rows = super().footer_rows()
        return rows if self.directory is not None else [*IN_LIST, *(key for key in rows if key.screen != "chat")]

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect now; None if the key has an effect."""
        if action == "next_column" and self.directory is not None and len(self.columns) < 2:
            return "there is one column; M opens another model next to it"
        if action == "open" and self.directory is None and not self._offered:
            return "there is no chat yet, and no run to chat with"
        if action in OPEN_ACTIONS and self.directory is None:
            return "no chat is open: Enter opens one"
        status, asked = self.state.status, bool(self.state.exchanges)
        if action in ("base", "difference", "tokens", "again", "undo", "prefer", "reject", "save") and not asked:
            return "no question yet"
        if action in ("base", "again", "undo") and status != "ready":
            return f"the chat is {status}"
        if action == "base" and not self.state.base:
            return "the base is not available in this chat; M starts a chat with it"
        if action == "difference" and len(self.columns) < 2:
            return "there is one answer; b shows the base's, M opens another model"
        if action in ("prefer", "reject") and not self.other_answers():
            return "there is no other answer to compare with; R answers again, M opens another model"
        if action == "leave_chat" and self.directory is None:
            return "no chat is open"
        return None

    def step_back(self) -> bool:
        """From the tokens or the difference to the text, then to the list; returns False there."""
        if self.directory is not None and self.view != "text":
            self.view = "text"
            self.paint()
            return True
        return super().step_back()

    def on_row_list_selected(self) -> None:
        """Open the chat or run when Enter is pressed."""
        self.action_press("open")

    def do_open(self) -> None:
        """Go to the field; in the list, go on with the chat under the cursor, or begin one with the run under it."""
        if self.directory is not None:
            self.do_type()
            return
        index = self.query_one("#chats", RowList).cursor
        if index < len(self._offered):
            opens = self._offered[index].opens
            if isinstance(opens, ChatTargets):
                self.begin(opens)
            else:
                self.targets = ()
                self._open(opens)

    def do_leave_chat(self) -> None:
        """Go to the list; the chat goes on, and says what it keeps."""
        self._close()
        if self.state.status != "ended":
            self.show_message("the chat keeps its model in memory until x or q ends it")

    def _close(self) -> None:
        self.directory = None
        self._arrange()

    def do_type(self) -> None:
        """Go to the field."""
        self.set_focus(self.query_one("#question", ChatField))

    def do_leave_field(self) -> None:
        """Leave the field, so that letters are keys."""
        self.set_focus(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Send what was typed, if it was typed into the field of questions."""
        if event.input.id == "question":
            self.do_send_typed()

    def do_send_typed(self) -> None:
        """Ask, or obey a command with a slash."""
        field = self.query_one("#question", ChatField)
        text, field.value = field.value, ""
        command, _, rest = text.strip().partition(" ")
        if command.startswith("/"):
            self._command(command, rest.strip())
        elif command:  # with its spaces: a prompt of plain text may end with one
            images, self.images = self.images, []
            self._sent.append(text)
            self.send("ask", text=text, images=images)

    def _command(self, command: str, rest: str) -> None:
        actions = {"/undo": "undo", "/regen": "again", "/base": "base", "/quit": "end", "/exit": "end"}
        if command in actions:
            self.action_press(actions[command])
        elif command == "/system":
            self.send("system", text=rest)
        elif command == "/save":
            self.save(rest or CONVERSATIONS)
        elif command == "/image":
            self.add_image(rest)
        else:
            self.show_message("/undo /regen /base /system TEXT /image FILE /save FILE /quit; esc, then ? for the keys")

    def send(self, name: str, **fields: Any) -> None:
        """Send a request; if the process has ended, start it again first."""
        if self.directory is None:
            return
        try:
            if name in ("ask", "again") and take_up_chat(self.directory):
                self.state.status = "loading"
            send_request(self.directory, name, **fields)
        except (TunedeckError, OSError) as error:
            self._show_problem(error)
            return
        self.call_after_refresh(self.paint)

    def do_stop(self) -> None:
        """End the answer that is written; if none is, the chat."""
        if self.state.status == "answering":
            self.send("stop")
            self.show_message("the answer ends here")
        else:
            self.do_end()

    def do_end(self) -> None:
        """End the chat's process, which frees its memory; what was said is kept."""
        self.send("end")
        self._close()
        self.show_message("the chat has ended; Enter on it continues it")

    def on_resize(self, event: events.Resize) -> None:
        """Wrap the lines for the new width."""
        super().on_resize(event)
        self.call_after_refresh(self.paint)
