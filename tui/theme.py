"""Themes, and the colours and glyphs of states, verdicts and memory components. The layout is in `console.tcss`.

The colours are the palette of Okabe and Ito (jfly.uni-koeln.de/color), whose colours remain distinct with every common
kind of colour blindness; on a light background its pale ones are darkened until text in them is readable. Nothing is
shown by colour alone: every state has a word and a glyph beside it, and with `--ascii` the glyph is a letter.

Try: `T` in the console.
"""

from __future__ import annotations

from typing import NamedTuple

from textual.theme import Theme


class StateStyle(NamedTuple):
    """The glyph, the ASCII letter and the style of a run's state or a plan's verdict."""

    glyph: str
    letter: str
    """The ASCII letter that is drawn instead of the glyph under --ascii."""
    style: str


STATES: dict[str, StateStyle] = {
    "queued": StateStyle("○", "q", "$muted"),
    "running": StateStyle("●", "R", "bold $good"),
    "stopping": StateStyle("◐", "S", "bold $caution"),
    "paused": StateStyle("‖", "P", "$caution"),
    "done": StateStyle("✓", "D", "$info"),
    "stopped": StateStyle("■", "S", "$muted"),
    "failed": StateStyle("✗", "F", "bold $bad"),
    "oom": StateStyle("▲", "O", "bold $bad"),
    "stale": StateStyle("?", "?", "bold $caution"),
    "skipped": StateStyle("─", "-", "$muted"),
    "pending": StateStyle("·", ".", "$muted"),
}
"""The statuses of the journal, `stopping` for a running run that was asked to stop, and for stages of a staged run also
`skipped` and `pending`."""


class ComponentStyle(NamedTuple):
    """The letter of a component in the memory bar, and the style of the letter and its background."""

    letter: str
    style: str


COMPONENTS: dict[str, ComponentStyle] = {
    "weights": ComponentStyle("w", "$paper on $part-weights"),
    "adapters": ComponentStyle("d", "$ink on $part-adapters"),
    "gradients": ComponentStyle("g", "$ink on $part-gradients"),
    "optimizer": ComponentStyle("o", "$ink on $part-optimizer"),
    "activations": ComponentStyle("a", "$ink on $part-activations"),
    "recompute": ComponentStyle("r", "$ink on $part-recompute"),
    "loss": ComponentStyle("l", "$ink on $part-loss"),
    "buffers": ComponentStyle("b", "$ink on $part-buffers"),
    "workspace": ComponentStyle("k", "$paper on $part-workspace"),
    "context": ComponentStyle("c", "$paper on $part-context"),
    "fragmentation": ComponentStyle("f", "$ink on $part-fragmentation"),
}
"""The components of a memory prediction in the order of the bar, with the letters that `tunedeck plan` uses."""

VERDICTS: dict[str, StateStyle] = {
    "fits": StateStyle("✓", "+", "bold $good"),
    "fits_smaller": StateStyle("◐", "~", "bold $caution"),
    "does_not_fit": StateStyle("✗", "x", "bold $bad"),
}
"""The verdicts of a plan. Screens show spaces for their underscores."""

ASCII = {"●": "*", "○": "o", "▲": "O", "▼": "v", "✓": "+", "✗": "x", "■": "#", "‖": "=", "◐": "~", "│": "|", "─": "-",
         "█": "#", "▓": "%", "▒": "+", "░": ".", "→": ">", "·": "-", "▶": ">", "…": "~", "×": "x", "≤": "<=", "┊": ":",
         "▁": "_", "▂": ".", "▃": ",", "▄": "-", "▅": "=", "▆": "+", "▇": "*",
         "├": "|", "└": "`", "┤": "|", "◆": "E", "⚠": "!", "▏": "|", "°": " ",
         "␣": "_", "≥": ">=", "≈": "~", "↑": "^", "↓": "v", "┃": "|", "╱": "/"}  # fmt: skip
"""The ASCII replacement of each glyph."""

TO_ASCII = str.maketrans(ASCII)

SPACE = "␣"
"""Drawn for the last space of a prompt: a model that learned to go on behind a space needs it."""


def glyphs(text: str, *, ascii_only: bool) -> str:
    """Replace the console's own glyphs by ASCII characters if `ascii_only`. Must not be used for text from files."""
    return text.translate(TO_ASCII) if ascii_only else text


COMPONENT_COLOURS = {
    "part-weights": "#0072b2", "part-adapters": "#56b4e9", "part-gradients": "#009e73", "part-optimizer": "#cc79a7",
    "part-activations": "#e69f00", "part-recompute": "#f0e442", "part-loss": "#d55e00", "part-buffers": "#8b96a3",
    "part-workspace": "#3d4d8a", "part-context": "#565f6a", "part-fragmentation": "#b8a9c9",
    "ink": "#0b0d10", "paper": "#ffffff",
}  # fmt: skip
"""Background colours of the memory bar, the same in the dark and the light theme: the letters on them contrast."""


def _theme(name: str, *, dark: bool, ground: tuple[str, str, str], text: str, variables: dict[str, str]) -> Theme:
    background, surface, panel = ground
    return Theme(
        name=name, dark=dark, foreground=text, background=background, surface=surface, panel=panel,
        primary=variables["info"], secondary=variables["mark"], accent=variables["caution"], success=variables["good"],
        warning=variables["caution"], error=variables["bad"],
        variables={**COMPONENT_COLOURS, **variables, "border": variables["line"], "border-blurred": variables["line"]},
    )  # fmt: skip


DARK = _theme(
    "dark", dark=True, ground=("#11151a", "#181e25", "#222a33"), text="#d9dee4",
    variables={
        "good": "#1fb98a", "info": "#56b4e9", "caution": "#e69f00", "bad": "#f0743a", "mark": "#cc79a7",
        "band": "#2d5f7c", "muted": "#8b96a3", "line": "#3a4552", "chosen": "#2b3947", "series-4": "#f0e442",
    },
)  # fmt: skip

LIGHT = _theme(
    "light", dark=False, ground=("#fbfbf9", "#f1f1ee", "#e6e6e2"), text="#1c2126",
    variables={
        "good": "#00704f", "info": "#00619a", "caution": "#8a5a00", "bad": "#b34700", "mark": "#96457a",
        "band": "#a9cfe6", "muted": "#5e6872", "line": "#b9bec4", "chosen": "#d5e3ee", "series-4": "#6d6500",
    },
)  # fmt: skip

ANSI = Theme(
    name="ansi", ansi=True, dark=True, foreground="ansi_default", background="ansi_default", surface="ansi_default",
    panel="ansi_default", boost="ansi_default", primary="ansi_cyan", secondary="ansi_magenta", accent="ansi_yellow",
    success="ansi_green", warning="ansi_yellow", error="ansi_red",
    variables={
        "good": "ansi_green", "info": "ansi_cyan", "caution": "ansi_yellow", "bad": "ansi_bright_red",
        "mark": "ansi_magenta", "band": "ansi_blue", "muted": "ansi_bright_black", "line": "ansi_bright_black",
        "chosen": "ansi_blue", "series-4": "ansi_bright_yellow",
        "part-weights": "ansi_blue", "part-adapters": "ansi_cyan", "part-gradients": "ansi_green",
        "part-optimizer": "ansi_magenta", "part-activations": "ansi_yellow", "part-recompute": "ansi_bright_yellow",
        "part-loss": "ansi_red", "part-buffers": "ansi_white", "part-workspace": "ansi_bright_blue",
        "part-context": "ansi_bright_black", "part-fragmentation": "ansi_bright_magenta", "ink": "ansi_black",
        "paper": "ansi_bright_white",
        "ansi-background": "ansi_black", "ansi-foreground": "ansi_white", "border": "ansi_bright_black",
        "border-blurred": "ansi_bright_black", "block-cursor-foreground": "ansi_black",
        "block-cursor-background": "ansi_white", "input-cursor-background": "ansi_white",
        "input-cursor-foreground": "ansi_black", "input-cursor-text-style": "none",
        "input-selection-background": "ansi_bright_blue", "input-selection-foreground": "ansi_black",
        "screen-selection-background": "ansi_bright_blue", "screen-selection-foreground": "ansi_black",
    },
)  # fmt: skip
"""The terminal's own sixteen colours on its own background."""

THEMES = (DARK, LIGHT, ANSI)
