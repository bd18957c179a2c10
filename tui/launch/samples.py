"""Tokenised samples as lines: what the model sees, with what it learns from standing out. Pure functions of the report
that `tunedeck data --json` prints.

Texts are strangers': control characters are written out, and nothing in them is read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from textual.content import Content

from engine.spec.files.text import visible

MARKS = ("⟦", "⟧")
ASCII_MARKS = ("[[", "]]")


def sample_lines(report: Mapping[str, Any], width: int, *, ascii_only: bool) -> list[Content]:
    """The report's counts, then each sample; learned text is bold and between marks."""
    contents = [*_counts(report), *_samples(report, ASCII_MARKS if ascii_only else MARKS)]
    return [line for content in contents for line in content.wrap(max(16, width - 1))]


def _counts(report: Mapping[str, Any]) -> Iterator[Content]:
    for part in report.get("parts", []):
        yield Content.assemble(
            (f"{visible(str(part['part']))}: ", "bold"),
            f"{part['rows']:,} sequences, {part['tokens']:,} tokens, {part['target_share']:.0%} learned",
        )
        lengths = [f"{share}% up to {length:,}" for share, length in part.get("percentiles", {}).items()]
        yield Content.styled(f"tokens: {', '.join(lengths)}", "$muted")
    for source in report.get("sources", []):
        for reason, count in source.get("dropped", {}).items():
            text = f"dropped from {visible(str(source['name']))}: {count:,} x {visible(reason)}"
            yield Content.styled(text, "$caution")


def _samples(report: Mapping[str, Any], marks: tuple[str, str]) -> Iterator[Content]:
    for number, sample in enumerate(report.get("samples", []), 1):
        yield Content("")
        source = visible(str(sample["source"]))
        head = f"sample {number}, {source}: {sample['tokens']} tokens, {sample['target_tokens']} learned"
        yield Content.styled(head, "bold $info")
        yield from Content.assemble(*_pieces(sample["pieces"], marks)).split("\n", allow_blank=True)


def _pieces(pieces: list[dict[str, Any]], marks: tuple[str, str]) -> Iterator[Content]:
    document = 0
    for piece in pieces:
        if piece["document"] != document:
            document = piece["document"]
            yield Content.styled("\n-- next document --\n", "$muted")
        text = visible(piece["text"], keep="\n")
        yield Content.styled(f"{marks[0]}{text}{marks[1]}", "bold $good") if piece["learned"] else Content(text)
