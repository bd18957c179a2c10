"""The key table: every key of the console, once. Bindings, footer, help and command palette are made from it.

A row names a method: key `p` of the screen `run` with the action `pause` calls `do_pause` there, unless the screen's
`disabled_reason("pause")` says why it has no effect now. Never used are ctrl+b and ctrl+a (the prefixes of tmux and
screen) and ctrl+s (stops a terminal's output).

Try: `?` in the console.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from textual.binding import BindingType

EVERYWHERE = "everywhere"


class Key(NamedTuple):
    """One row of the key table: the keys that call an action, and the screen on which they do so."""

    screen: str
    """The screen's name, or EVERYWHERE."""
    keys: str
    """Textual's names of the keys, separated by commas; the first is shown in the footer."""
    action: str
    label: str
    """One or two words for the footer; with an empty label the key is not shown there."""
    help: str


KEYS: tuple[Key, ...] = (
    Key(EVERYWHERE, "question_mark,f1", "help", "help", "show the keys of this screen"),
    Key(EVERYWHERE, "escape", "back", "back", "go back; discard input; clear a filter"),
    Key(EVERYWHERE, "q", "leave", "quit", "leave the console; training continues"),
    Key(EVERYWHERE, "colon", "palette", "", "find a screen or an action by name (also ctrl+p)"),
    Key(EVERYWHERE, "ctrl+z", "suspend", "", "suspend the console; fg in the shell resumes it"),
    Key(EVERYWHERE, "T", "theme", "", "next theme: dark, light, ansi"),
    Key("runs", "enter", "open", "open", "open this run"),
    Key("runs", "l,right", "unfold", "", "expand a staged run to its stages, a sweep to its runs"),
    Key("runs", "h,left", "fold", "", "collapse it"),
    Key("runs", "r", "resume", "resume", "resume a paused, stopped or crashed run"),
    Key("runs", "n", "clone", "new run", "open the Launch screen with the settings of this run"),
    Key("runs", "space", "mark", "mark", "mark the run for comparison, or unmark it"),
    Key("runs", "c", "compare", "compare", "plot the marked runs together, with a table of differences"),
    Key("runs", "A", "chat", "chat", "chat with this run, or with the marked runs side by side"),
    Key("runs", "E", "evaluate", "", "score the newest checkpoint of this run in the background"),
    Key("runs", "x", "delete", "delete", "move the run into .trash of its runs folder; asks for confirmation"),
    Key("runs", "slash", "filter", "filter", "filter: words, or state:running model:qwen recipe: profile: name:"),
    Key("runs", "greater_than_sign", "sort", "sort", "sort by the next column; after the last, newest first"),
    Key("runs", "less_than_sign", "reverse", "", "reverse the order"),
    Key("runs", "C", "columns", "", "choose the columns"),
    Key("runs", "t", "label", "tag", "tags and a note, stored with the run"),
    Key("runs", "Y", "copy_path", "", "copy the path of the run's folder"),
    Key("runs", "W", "merge", "", "merge the adapter into the base in the background"),
    Key("runs", "U", "push", "", "push the result to a Hugging Face hub repository; prompts for its name"),
    Key("runs", "u", "undo", "", "restore the last deleted run from .trash; again: the one before it"),
    Key("launch", "s", "start", "start", "start the run; it continues without the console"),
    Key("launch", "enter", "enter", "edit", "edit the setting; open the list of files; run the tab's action"),
    Key("launch", "a", "apply", "apply", "apply the fix under the cursor, else the first one"),
    Key("launch", "R", "pick_recipe", "recipe", "choose a recipe from the list, with verdicts"),
    Key("launch", "P", "pick_profile", "profile", "choose a profile from the list"),
    Key("launch", "tab,l,right", "next_pane", "pane", "the next pane"),
    Key("launch", "shift+tab,h,left", "previous_pane", "", "the previous pane"),
    Key("launch", "z", "enlarge", "", "maximise this pane; again: show all"),
    Key("launch", "right_square_bracket", "next_tab", "tab", "the next tab: fixes, samples, command, difference"),
    Key("launch", "left_square_bracket", "previous_tab", "", "the previous tab"),
    Key("launch", "u", "undo", "undo", "undo the last change"),
    Key("launch", "space", "toggle", "", "skip the stage under the cursor, or include it again"),
    Key("launch", "backspace", "restore", "", "restore the value from the file"),
    Key("launch", "w", "save", "save", "save the changed recipe or profile as a new file"),
    Key("launch", "d", "samples", "", "read samples of the data, with their target tokens marked"),
    Key("launch", "f", "memory", "memory", "memory by phase: the peak, and how to lower it"),
    Key("launch", "Q", "queue", "queue", "add the run to the queue"),
    Key("launch", "y", "copy", "", "copy the command that starts this run"),
    Key("launch", "S", "force", "", "start although it does not fit"),
    Key("run", "w", "checkpoint", "checkpoint", "write a checkpoint after this step and continue"),
    Key("run", "p", "pause", "pause", "write a checkpoint, end the engine and free the device"),
    Key("run", "r", "resume", "resume", "resume the run after a pause, a stop or a crash"),
    Key(
        "run",
        "x",
        "stop",
        "stop",
        "stop after this step with a checkpoint (asks for confirmation); again: stop immediately",
    ),
    Key(
        "run",
        "right_square_bracket",
        "next_stage",
        "",
        "show the next stage; in the scores: later answers",
    ),
    Key("run", "left_square_bracket", "previous_stage", "", "show the previous stage; in the scores: earlier answers"),
    Key("run", "o", "report", "out-of-memory report", "out-of-memory errors: what used the memory, and the remedy"),
    Key("run", "A", "chat", "chat", "chat with the model of this run, also during training"),
    Key("run", "E", "evaluate", "", "score the newest checkpoint in the background; b shows the scores"),
    Key("run", "n", "clone", "new run", "open the Launch screen with the settings of this run"),
    Key("run", "t", "label", "tag", "tags and a note, stored with the run"),
    Key("run", "Y", "copy_path", "", "copy the path of the run's folder"),
    Key("run", "W", "merge", "merge", "merge the adapter into the base in the background"),
    Key("run", "U", "push", "", "push the result to a Hugging Face hub repository; prompts for its name"),
    Key("run", "v", "next_metric", "metric", "plot another metric: evaluation loss, learning rate, speed, memory, GPU"),
    Key("run", "V", "previous_metric", "", "plot the previous metric"),
    Key("run", "L", "log_axis", "log axis", "show the curve on a log or a linear axis"),
    Key("run", "m", "smooth", "smooth", "draw the curve smoothed, then thick, then unchanged"),
    Key("run", "M", "grid", "", "show all metrics at once in a grid of small plots; again: one"),
    Key("run", "left", "cursor_left", "", "read values with a cursor on the plot: the newest, then to the left"),
    Key("run", "right", "cursor_right", "", "move the cursor right; esc removes it"),
    Key("run", "shift+left", "cursor_far_left", "", "move the cursor ten cells left"),
    Key("run", "shift+right", "cursor_far_right", "", "move the cursor ten cells right"),
    Key("run", "y", "copy", "", "copy the points of the plot, or the text of the active pane"),
    Key("run", "e", "export_plot", "", "write the plot as an SVG picture into the run's folder"),
    Key("run", "plus,equals_sign", "zoom_in", "closer", "show the last half of the run, then its last tenth"),
    Key("run", "minus", "zoom_out", "", "show more of the run again"),
    Key("run", "tab", "next_pane", "", "next pane: scroll, filter and maximise act on it"),
    Key("run", "shift+tab", "previous_pane", "", "previous pane"),
    Key("run", "z", "enlarge", "enlarge", "maximise this pane; again: show all"),
    Key("run", "slash", "filter", "filter", "filter events and log lines by words"),
    Key("run", "F", "next_kind", "", "show only problems, evaluations or checkpoints; in the log warnings, errors"),
    Key("run", "b", "scores", "scores", "scores of each checkpoint, and answers next to their references"),
    Key("run", "f", "memory", "memory", "predicted memory by phase: the peak, and how to lower it"),
    Key("run", "up,k", "older", "", "scroll events, log or scores up"),
    Key("run", "down,j", "newer", "", "scroll events, log or scores down"),
    Key("run", "pageup,ctrl+u", "page_older", "", "scroll a page up"),
    Key("run", "pagedown,ctrl+d", "page_newer", "", "scroll a page down"),
    Key("run", "end,G", "newest", "", "go to the newest line, and follow it"),
    Key("chat", "enter", "open", "type", "type in the field: Enter sends, esc leaves it; in the list: open this chat"),
    Key("chat", "ctrl+c", "stop", "stop", "stop the current answer; if there is none, end the chat"),
    Key("chat", "R", "again", "again", "answer the last question again"),
    Key("chat", "u", "undo", "undo", "remove the last question and its answers"),
    Key("chat", "b", "base", "base", "show the base model's answer in a column; again: hide it"),
    Key("chat", "d", "difference", "difference", "mark the words that differ between columns; again: unmark"),
    Key("chat", "k", "tokens", "tokens", "show the rendered prompt, and the answer's tokens by likelihood"),
    Key(
        "chat", "plus,equals_sign", "prefer", "better", "save this answer as better than the others (preference pairs)"
    ),
    Key("chat", "minus", "reject", "worse", "save this answer as worse than the others (preference pairs)"),
    Key("chat", "M", "models", "models", "start a chat with other models, side by side"),
    Key("chat", "w", "save", "save", 'append the conversation to a file, a data source with format = "chat"'),
    Key("chat", "S", "system", "", "change the system prompt"),
    Key("chat", "I", "image", "", "attach a picture to the next question"),
    Key("chat", "greater_than_sign", "warmer", "warmer", "a higher temperature: less likely tokens"),
    Key("chat", "less_than_sign", "colder", "", "a lower temperature; at 0 answers are greedy"),
    Key("chat", "right_square_bracket", "wider", "", "a higher top_p"),
    Key("chat", "left_square_bracket", "narrower", "", "a lower top_p"),
    Key("chat", "N", "reseed", "", "the next seed"),
    Key("chat", "tab,l,right", "next_column", "", "next column: keys act on its answer"),
    Key("chat", "shift+tab,h,left", "previous_column", "", "previous column"),
    Key("chat", "C", "leave_chat", "chats", "list the chats; this one continues"),
    Key("chat", "x", "end", "end", "end the chat's process, which frees its memory"),
    Key("chat", "up", "older", "", "scroll up"),
    Key("chat", "down", "newer", "", "scroll down"),
    Key("chat", "pageup,ctrl+u", "page_older", "", "scroll a page up"),
    Key("chat", "pagedown,ctrl+d", "page_newer", "", "scroll a page down"),
    Key("chat", "end,G", "newest", "", "go to the newest line"),
    Key("oom", "a", "apply", "apply", "open the Launch screen with the change under the cursor, else the first one"),
    Key("doctor", "R", "again", "check again", "check this machine again"),
    Key("library", "enter", "edit", "edit", "edit the file; shipped files are copied to ./profiles"),
    Key("library", "n", "use", "new run", "open the Launch screen with this profile or recipe"),
    Key("library", "A", "chat", "chat", "chat with the model of this recipe before training"),
    Key("library", "f4", "external_editor", "$EDITOR", "edit the file in $VISUAL or $EDITOR"),
    Key("library", "Y", "copy_path", "", "copy the path of the file"),
    Key("library", "w", "new", "new file", "create a new file from this one"),
    Key("library", "i", "import_file", "import", "check a file and copy it into your folder"),
    Key("library", "e", "export_file", "export", "write a copy of the file for someone else"),
    Key("library", "tab,l,right", "other_pane", "pane", "switch between list and text"),
    Key("library", "shift+tab,h,left", "other_pane", "", "switch between list and text"),
    Key("library", "z", "enlarge", "enlarge", "maximise list or text; again: show both"),
    Key("editor", "f2", "save", "save", "save the file"),
    Key("editor", "tab,ctrl+at", "complete", "complete", "complete the word at the cursor; in the list: accept it"),
    Key("editor", "f3", "next_problem", "next problem", "go to the next line with a problem"),
    Key("queue", "s", "start", "start", "start the queued runs one after another, also without this console"),
    Key("queue", "K,shift+up", "sooner", "sooner", "move this run one place up"),
    Key("queue", "J,shift+down", "later", "later", "move this run one place down"),
    Key("queue", "x", "remove", "remove", "remove this run (press twice); its folder goes to the trash"),
    Key("queue", "p", "end", "pause", "start no more runs; the current one continues"),
    Key("queue", "enter", "open", "", "open this run"),
    Key("compare", "A", "chat", "chat with all", "chat with these runs side by side"),
    Key("compare", "E", "evaluate", "", "score the newest checkpoint of each run in the background"),
    Key("compare", "tab", "next_pane", "", "plot or table, if there is no space for both"),
    Key("compare", "z", "enlarge", "enlarge", "maximise the plot (tab: the table); again: show both"),
    Key("compare", "X", "axis", "axis", "plot over steps, tokens or training time"),
    Key("compare", "L", "log_axis", "log axis", "show the curves on a log or a linear axis"),
    Key("compare", "m", "smooth", "smooth", "draw the curves smoothed, then thick, then unchanged"),
    Key("compare", "plus,equals_sign", "zoom_in", "", "show the last half of the runs, then the last tenth"),
    Key("compare", "minus", "zoom_out", "", "show more of the runs again"),
    Key("compare", "v", "next_metric", "metric", "plot another metric: evaluation loss, learning rate, speed, memory"),
    Key("compare", "V", "previous_metric", "", "plot the previous metric"),
    Key("compare", "left", "cursor_left", "", "read values with a cursor on the plot: each run at the newest point"),
    Key("compare", "right", "cursor_right", "", "move the cursor right; esc removes it"),
    Key("compare", "shift+left", "cursor_far_left", "", "move the cursor ten cells left"),
    Key("compare", "shift+right", "cursor_far_right", "", "move the cursor ten cells right"),
    Key("compare", "y", "copy", "", "copy the points of the plot"),
    Key("compare", "e", "export_plot", "", "write the plot as an SVG picture into the working directory"),
)
"""All rows of the key table, in the order in which footer and help show them."""


def while_typing(enter: str) -> list[Key]:
    """The keys that are not letters of the text being typed into a field; `enter` is what Enter does with the text."""
    return [
        Key(EVERYWHERE, "enter", "accept", enter, f"{enter} what was typed"),
        Key(EVERYWHERE, "escape", "discard", "discard", "discard what was typed"),
    ]


KEY_SYMBOLS = {"question_mark": "?", "slash": "/", "colon": ":", "escape": "esc", "comma": ",", "full_stop": ".",
               "plus": "+", "ctrl+at": "ctrl+space", "minus": "-", "equals_sign": "=",
               "greater_than_sign": ">", "less_than_sign": "<",
               "left_square_bracket": "[", "right_square_bracket": "]"}  # fmt: skip
"""Symbols printed on keys that have another name in Textual."""


def key_label(keys: str) -> str:
    """The first of the comma-separated keys, as printed on the keyboard."""
    first = keys.partition(",")[0]
    return KEY_SYMBOLS.get(first, first)


def all_key_labels(keys: str) -> str:
    """All of the comma-separated keys, as printed on the keyboard."""
    return " ".join(KEY_SYMBOLS.get(key, key) for key in keys.split(","))


def of_screen(screen: str) -> list[Key]:
    """Return the rows of the key table for one screen, in the table's order."""
    return [key for key in KEYS if key.screen == screen]


def bindings(screen: str) -> list[BindingType]:
    """The rows of one screen as Textual bindings. Each binding calls `action_press`, which first asks the screen's
    `disabled_reason`."""
    from textual.binding import Binding

    return [Binding(key.keys, f"press({key.action!r})", key.label or key.help, show=False) for key in of_screen(screen)]
