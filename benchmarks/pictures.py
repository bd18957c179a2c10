"""Makes the pictures of the console in README and docs, with Textual, from a real run of the demo recipe.

Opens the console on a runs folder, goes to each screen by pressing keys, and writes the screen as SVG. Every word is a
text element with its own position, and no external font is used, so the picture looks the same in a browser, on a code
host and in `rsvg-convert`, with any monospaced font.

Run: `python -m benchmarks.pictures RUNS_FOLDER` after `tunedeck train -p demo -r demo --runs RUNS_FOLDER`
"""

from __future__ import annotations

import asyncio
import re
import sys
from html import escape, unescape
from pathlib import Path

from textual.pilot import Pilot

from tui.app import TunedeckApp
from tui.arguments import Flags

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SIZE = (120, 36)
SETTLE_SECONDS = 2.5
"""Time for a screen to show everything: curves are drawn at most once a second, recipes' verdicts one by one."""

SCREENS = {"launch": (), "run": ("1", "g", "enter"), "out-of-memory": ("o",)}
"""The pictures, each with the keys that lead to its screen from the screen of the previous picture."""

CELL = 12.2
"""Width of a character in Rich's pictures."""

TEXT = re.compile(
    r'<text class="([^"]+)" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+" clip-path="([^"]+)">([^<]*)</text>'
)
WORD = re.compile(r"[^ \xa0]+")


def portable(svg: str) -> str:
    """Remove external fonts from the SVG, and make every word a text element with its own position."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "monospace").replace("monospace, monospace", "monospace")
    return TEXT.sub(_words, svg)


def _words(match: re.Match[str]) -> str:
    style, x, y, clip, text = match.groups()
    parts = []
    for word in WORD.finditer(unescape(text)):
        start, length = float(x) + CELL * word.start(), CELL * len(word[0])
        parts.append(
            f'<text class="{style}" x="{start:.1f}" y="{y}" textLength="{length:.1f}" '
            f'lengthAdjust="spacingAndGlyphs" clip-path="{clip}">{escape(word[0])}</text>'
        )
    return "".join(parts)


async def write_pictures(runs: str) -> None:
    """Open the console on the runs folder `runs`, and write every picture of SCREENS into docs/pictures."""
    app = TunedeckApp(Flags(runs=runs, theme="dark", profile="demo", recipe="demo"))
    async with app.run_test(size=SIZE) as pilot:
        for name, keys in SCREENS.items():
            await _press(pilot, *keys)
            FOLDER.mkdir(parents=True, exist_ok=True)
            picture = app.export_screenshot(title="tunedeck", simplify=True)
            (FOLDER / f"{name}.svg").write_text(portable(picture), "utf-8")


async def _press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await pilot.pause(SETTLE_SECONDS / 5)
    await pilot.pause(SETTLE_SECONDS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m benchmarks.pictures RUNS_FOLDER (pictures go to {FOLDER})")
    asyncio.run(write_pictures(sys.argv[1]))
