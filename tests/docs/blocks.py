"""The fenced blocks of README and docs, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(.*)$")
INLINE = re.compile(r"`(tunedeck[^`\n]*)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its label ("sh", "text", ...), its text."""

    page: str
    line: int
    label: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command as printed, its continuation lines joined and its comment left out."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """The command's words, as a shell splits them."""
        return shlex.split(self.text, comments=True)

    @property
    def tunedeck_arguments(self) -> list[str] | None:
        """The arguments of `tunedeck`, also if a launcher such as torchrun starts it; None for other commands."""
        return self.words[self.words.index("tunedeck") + 1 :] if "tunedeck" in self.words else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Every fenced block of every page."""
    found = []
    for page in PAGES:
        start, label = 0, ""
        lines: list[str] = []
        for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
            fence = FENCE.match(line)
            if fence and not start:
                start, label, lines = number, fence[1], []
            elif fence:
                found.append(Block(str(page.relative_to(ROOT)), start, label, "\n".join(lines) + "\n"))
                start = 0
            else:
                lines.append(line)
        assert not start, f"{page}:{start}: the block does not end"
    return found


def section(page: str, title: str) -> list[Block]:
    """The blocks below one heading, up to the next of the same or a higher level."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    start = lines.index(title)
    level = title.partition(" ")[0]
    ends = [number for number, line in enumerate(lines) if number > start and re.match(f"#{{1,{len(level)}}} ", line)]
    end = min(ends, default=len(lines))
    return [block for block in blocks() if block.page == page and start < block.line - 1 < end]


def commands() -> list[Command]:
    """Every command of every block labelled "sh". Lines that `cat > FILE <<'END'` writes to a file are no commands."""
    found = []
    for block in blocks():
        if block.label != "sh":
            continue
        text = re.sub(
            r"^cat > .*<<'END'\n(.*\n)*?END\n", lambda match: "\n" * match[0].count("\n"), block.text, flags=re.M
        )
        pending, start = "", 0
        for number, line in enumerate(text.splitlines(), start=block.line + 1):
            start = start if pending else number
            pending += line.removesuffix("\\")
            if pending.strip() and not line.endswith("\\"):
                found.append(Command(block.page, start, pending))
            pending = pending if line.endswith("\\") else ""
    return found


def inline_commands() -> list[Command]:
    """Commands within sentences, in backticks; those with a placeholder for the command itself are left out."""
    return [
        Command(str(page.relative_to(ROOT)), number, text)
        for page in PAGES
        for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1)
        for text in INLINE.findall(line)
        if "COMMAND" not in text and "..." not in text
    ]
