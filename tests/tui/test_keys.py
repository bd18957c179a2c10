"""The key table: a letter means one thing on every screen."""

from __future__ import annotations

from tui.keys import KEYS

MEANINGS = {
    "a": {"apply"},
    "b": {"scores", "base"},
    "c": {"compare"},
    "d": {"samples", "difference"},
    "e": {"export_file", "export_plot"},
    "f": {"memory"},
    "h": {"fold", "previous_pane", "other_pane", "previous_column"},
    "i": {"import_file"},
    "j": {"newer"},
    "k": {"older", "tokens"},
    "l": {"unfold", "next_pane", "other_pane", "next_column"},
    "m": {"smooth"},
    "n": {"clone", "use"},
    "o": {"report"},
    "p": {"pause", "end"},
    "q": {"leave"},
    "r": {"resume"},
    "s": {"start"},
    "t": {"label"},
    "u": {"undo"},
    "v": {"next_metric"},
    "w": {"save", "checkpoint", "new"},
    "x": {"stop", "delete", "remove", "end"},
    "y": {"copy"},
    "z": {"enlarge"},
}
"""What each letter does: several names are one thing on several screens (left and right, write, end or remove)."""


def test_a_letter_means_one_thing_on_every_screen() -> None:
    for row in KEYS:
        for key in row.keys.split(","):
            if len(key) == 1 and key.islower():
                assert row.action in MEANINGS.get(key, set()), f"{key} on {row.screen}: {row.action}"
