"""Tokenised samples of a choice's data: read by a separate process, and formatted as lines of text.

The console never imports torch or transformers; `tunedeck data --json` tokenises and prints a report. The texts come
from data sets: control characters are written out, and nothing in them is read as markup.

Try: `tunedeck data -r demo --show 2 --json` prints the report.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.content import Content

from engine.config.files.text import visible
from engine.errors import TunedeckError

SAMPLES = 50
"""Samples that the tab pages through; `tunedeck data --row N` shows the others."""

TARGET_MARKS = ("⟦", "⟧")
"""Printed before and after text whose tokens are target tokens."""

ASCII_TARGET_MARKS = ("[[", "]]")

LEVELS, ASCII_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
"""Characters of the histogram of lengths, from no sequence to the most frequent length."""

BRIGHTNESS = " .:-=+*#%@"
"""Characters for pixels where there are no colours, from black to white."""

BOX_COLOUR = [255, 0, 60]
"""The colour in which `tunedeck data` draws the outline of a box."""

Cell = tuple[list[int], list[int]]
"""Two pixels of a picture, the upper and the lower one; each is red, green and blue from 0 to 255."""


async def read_samples(arguments: Sequence[str], count: int = SAMPLES) -> dict[str, Any]:
    """Run `tunedeck data` with these arguments and return its report, with `count` samples. Raises TunedeckError with
    the command's error message.

    If the call is cancelled, the process is ended.
    """
    from engine.launch.process import ENTRY_FILE  # slow to import: not before the first paint

    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(ENTRY_FILE), "data", *arguments, "--show", str(count), "--json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise TunedeckError(f"the process that reads the data cannot be started: {error.strerror or error}") from error
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        raise TunedeckError("\n".join(lines[-6:]) or f"the samples could not be read: exit code {process.returncode}")
    try:
        return dict(json.loads(out))
    except (ValueError, TypeError) as error:
        raise TunedeckError("cannot read the output of tunedeck data", fix="run the command in a shell") from error


def sample_lines(report: Mapping[str, Any], width: int, *, ascii_only: bool, letters: bool) -> list[Content]:
    """Format a report of `tunedeck data --json` as lines: the report's counts, then each sample with its pictures.
    Target tokens are bold and enclosed in TARGET_MARKS. With `letters` pictures are drawn without colours."""
    if "stages" in report:
        parts = report["stages"].items()
        told = [(name, sample_lines(each, width, ascii_only=ascii_only, letters=letters)) for name, each in parts]
        return [line for name, lines in told for line in (Content.styled(f"stage {visible(name)}", "bold"), *lines)]
    width = max(16, width - 1)
    levels = ASCII_LEVELS if ascii_only else LEVELS
    lines = [line for content in _counts(report, levels) for line in content.wrap(width)]
    marks = ASCII_TARGET_MARKS if ascii_only else TARGET_MARKS
    specials = sorted(map(str, report.get("special_tokens", [])), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, specials))) if specials else None
    for number, sample in enumerate(report.get("samples", []), 1):
        contents = _sample(sample.get("number", number), sample, marks, pattern)
        lines += [line for content in contents for line in content.wrap(width)]
        for picture in sample.get("pictures", []):
            lines += _picture_lines(picture, width, letters=letters or ascii_only)
    return lines


def _picture_lines(picture: Sequence[Sequence[Cell]], width: int, *, letters: bool) -> list[Content]:
    """Draw a picture, lines of cells, with half blocks; with `letters` by brightness, and outlines of boxes as X. What
    is wider than `width` is cut."""
    draw = _letter if letters else _half_block
    return [Content.assemble(*(draw(cell) for cell in line[:width])) for line in picture]


def _half_block(cell: Cell) -> tuple[str, str]:
    """The upper half block, and the style in which it shows both pixels."""
    above, below = (f"rgb({','.join(map(str, pixel))})" for pixel in cell)
    return ("▀", f"{above} on {below}")


def _letter(cell: Cell) -> str:
    if BOX_COLOUR in cell:
        return "X"
    return BRIGHTNESS[sum(map(sum, cell)) * len(BRIGHTNESS) // (6 * 256)]


def _counts(report: Mapping[str, Any], levels: str) -> Iterator[Content]:
    for part in report.get("parts", []):
        yield Content.assemble(
            (f"{visible(str(part['part']))}: ", "bold"),
            f"{part['rows']:,} sequences, {part['tokens']:,} tokens, {100 * part['target_share']:.0f} % target tokens",
        )
        yield _histogram(part, levels)
    lines = [visible(line) for line in (report.get("quality") or {}).get("lines", [])]
    warnings = [line for line in lines if line.startswith("WARNING")]
    yield from (Content.styled(line, "bold $bad") for line in warnings)
    if figures := [line for line in lines if line not in warnings]:
        yield Content.styled("; ".join(figures), "$muted")
    for notice in report.get("notices", []):
        yield Content.styled(visible(notice), "$caution")
    for source in report.get("sources", []):
        for reason, count in source.get("dropped", {}).items():
            text = f"dropped from {visible(str(source['name']))}: {count:,} x {visible(reason)}"
            yield Content.styled(text, "$caution")


def _histogram(part: Mapping[str, Any], levels: str) -> Content:
    """Lengths from the shortest to the longest, a character for each range by its number of sequences."""
    bars = part["histogram"]
    most = max(count for _, _, count in bars)
    drawn = "".join(levels[-(-count * (len(levels) - 1) // most)] for _, _, count in bars)
    shares = ", ".join(f"{share} % up to {part['percentiles'][share]:,}" for share in ("50", "95"))
    return Content.assemble(
        (f"tokens {bars[0][0]:,} ", "$muted"), (drawn, "$info"), (f" {bars[-1][1]:,}; {shares}", "$muted")
    )


def _sample(
    number: int, sample: Mapping[str, Any], marks: tuple[str, str], specials: re.Pattern[str] | None
) -> Iterator[Content]:
    yield Content("")
    source = visible(str(sample["source"]))
    head = f"sample {number}, {source}: {sample['tokens']} tokens, {sample['target_tokens']} target tokens"
    yield Content.styled(head, "bold $info")
    yield from Content.assemble(*_pieces(sample["pieces"], marks, specials)).split("\n", allow_blank=True)


def _pieces(
    pieces: list[dict[str, Any]], marks: tuple[str, str], specials: re.Pattern[str] | None
) -> Iterator[Content]:
    document = 0
    for piece in pieces:
        if piece["document"] != document:
            document = piece["document"]
            yield Content.styled("\n-- next document --\n", "$muted")
        text = visible(piece["text"], keep="\n")
        text = f"{marks[0]}{text}{marks[1]}" if piece["learned"] else text
        content = Content.styled(text, "bold $good") if piece["learned"] else Content(text)
        for found in specials.finditer(text) if specials else ():
            content = content.stylize("$info", found.start(), found.end())
        yield content
