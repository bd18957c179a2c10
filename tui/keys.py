"""The key table: every key of the console, once. Bindings, footer, help and command palette are made from it.

Data, and the few functions that turn it into what Textual wants. A row names a method: key `p` of the screen `run` with
the action `pause` calls `do_pause` there, unless the screen's `why_not("pause")` says why it cannot be done now.
Never ctrl+b, ctrl+a (the prefixes of tmux and screen) or ctrl+s (stops a terminal's output).

Try: `?` in the console.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from textual.binding import BindingType

EVERYWHERE = "everywhere"


class Key(NamedTuple):
    """One row. `keys` as Textual spells them, separated by commas; the first is the one shown."""

    where: str
    """The screen's name, or EVERYWHERE."""
    keys: str
    action: str
    label: str
    """One or two words for the footer; empty keeps the key out of it."""
    help: str


KEYS: tuple[Key, ...] = (
    Key(EVERYWHERE, "question_mark,f1", "help", "help", "what the keys do here"),
    Key(EVERYWHERE, "escape", "back", "back", "back; out of a field; out of a filter"),
    Key(EVERYWHERE, "q", "leave", "quit", "leave the console; training goes on"),
    Key(EVERYWHERE, "colon", "palette", "", "everything by name (also ctrl+p)"),
    Key(EVERYWHERE, "T", "theme", "", "next theme: dark, light, ansi"),
    Key("runs", "enter", "open", "open", "watch this run"),
    Key("runs", "r", "resume", "resume", "go on with a run that was paused or stopped, or crashed"),
    Key("runs", "n", "clone", "clone", "the same again on the Launch screen, to be changed before it starts"),
    Key("runs", "space", "mark", "mark", "mark the run for comparing, or take the mark away"),
    Key("runs", "c", "compare", "compare", "the marked runs in one plot, and what differs"),
    Key("runs", "x", "delete", "delete", "move the run into the folder .trash beside it; asks first"),
    Key("runs", "slash", "filter", "filter", "words, or state:running model:qwen recipe: profile: name:"),
    Key("launch", "s", "start", "start", "start the run: an engine of its own, which goes on without the console"),
    Key("launch", "enter", "enter", "edit", "edit the field; go on to the next list; do what the tab is for"),
    Key("launch", "tab,l,right", "next_pane", "pane", "the next pane"),
    Key("launch", "shift+tab,h,left", "previous_pane", "", "the pane before"),
    Key("launch", "right_square_bracket", "next_tab", "tab", "fixes, samples, command"),
    Key("launch", "left_square_bracket", "previous_tab", "", "the tab before"),
    Key("launch", "a", "apply", "apply", "apply the fix under the cursor, else the first one"),
    Key("launch", "u", "undo", "undo", "take the last change back"),
    Key("launch", "x", "restore", "", "the field as its file has it"),
    Key("launch", "w", "save", "save", "save what was changed as a new recipe or profile"),
    Key("launch", "d", "samples", "", "read samples of the data, with the loss mask"),
    Key("launch", "Q", "queue", "queue", "put the run at the end of the queue"),
    Key("launch", "y", "copy", "", "copy the headless command"),
    Key("launch", "S", "force", "", "start although it does not fit"),
    Key("run", "c", "checkpoint", "checkpoint", "write a checkpoint after this step, and go on"),
    Key("run", "p", "pause", "pause", "checkpoint, end the engine, free the device"),
    Key("run", "r", "resume", "resume", "go on: paused, stopped or crashed"),
    Key("run", "s", "stop", "stop", "stop after this step, with a checkpoint; asks; once more: at once, without"),
    Key("run", "o", "report", "oom report", "every time memory ran out, and what it was made of"),
    Key("run", "n", "clone", "clone", "the same again on the Launch screen, to be changed before it starts"),
    Key("run", "y", "log_axis", "log axis", "loss on a log axis, or not"),
    Key("run", "m", "smooth", "smooth", "loss smoothed, or as it is"),
    Key("run", "z", "zoom", "zoom", "the whole run, its last half, its last tenth"),
    Key("run", "tab", "next_pane", "", "the next pane, where there is not room for all"),
    Key("run", "up,k", "older", "", "back through events or log"),
    Key("run", "down,j", "newer", "", "forth through events or log"),
    Key("run", "pageup,ctrl+u", "page_older", "", "a page back"),
    Key("run", "pagedown,ctrl+d", "page_newer", "", "a page forth"),
    Key("run", "end,G", "newest", "", "to the newest line, and follow it"),
    Key("doctor", "r", "again", "ask again", "examine this machine once more"),
    Key("library", "enter", "edit", "edit", "edit the file; a shipped one as a copy in ./profiles"),
    Key("library", "u", "use", "use", "go to the Launch screen with this profile or recipe"),
    Key("library", "n", "new", "new", "a new file from this one, under another name"),
    Key("library", "i", "take_in", "import", "check a file and take it into your own folder"),
    Key("library", "e", "pass_on", "export", "write a copy of the file, to pass it on"),
    Key("library", "tab,l,right", "other_pane", "pane", "from the list to the text and back"),
    Key("library", "shift+tab,h,left", "other_pane", "", "the same"),
    Key("editor", "f2", "save", "save", "save the file"),
    Key("editor", "f3", "next_problem", "next problem", "to the next line that something is wrong with"),
    Key("queue", "s", "start", "start", "work on the queue: one run after another, without this console too"),
    Key("queue", "K,shift+up", "sooner", "sooner", "this run one place up"),
    Key("queue", "J,shift+down", "later", "later", "this run one place down"),
    Key("queue", "x", "remove", "remove", "take this run out (twice); its folder goes to the trash"),
    Key("queue", "e", "end", "end", "start no further run; the present one goes on"),
    Key("queue", "enter", "open", "", "watch this run"),
    Key("compare", "tab", "next_pane", "", "plot or table, where there is not room for both"),
    Key("compare", "x", "axis", "axis", "over steps, tokens or training time"),
    Key("compare", "y", "log_axis", "log axis", "loss on a log axis, or not"),
    Key("compare", "m", "smooth", "smooth", "loss smoothed, or as it is"),
)
"""In the order of footer and help."""

SHOWN = {"question_mark": "?", "slash": "/", "colon": ":", "escape": "esc", "comma": ",", "full_stop": ".",
         "plus": "+", "minus": "-", "left_square_bracket": "[", "right_square_bracket": "]"}  # fmt: skip
"""How keys are written whose name is not what is printed on them."""


def shown(keys: str) -> str:
    """The first of the keys, as a person writes it."""
    first = keys.partition(",")[0]
    return SHOWN.get(first, first)


def all_shown(keys: str) -> str:
    """All of the keys, as a person writes them."""
    return " ".join(SHOWN.get(key, key) for key in keys.split(","))


def of(where: str) -> list[Key]:
    """The rows of one screen."""
    return [key for key in KEYS if key.where == where]


def bindings(where: str) -> list[BindingType]:
    """The rows of one screen as Textual's bindings. Each goes through `press`, which asks `why_not` first."""
    from textual.binding import Binding

    return [Binding(key.keys, f"press({key.action!r})", key.label or key.help, show=False) for key in of(where)]
