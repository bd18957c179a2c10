"""Rows of preferences for tests: prompts with a chosen and a rejected answer of ragged length."""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS = "abcdefghij klmnop"


def write_pairs(path: Path, *, count: int, seed: int = 0, longest: int = 30) -> Path:
    drawn = random.Random(seed)

    def text(least: int) -> str:
        return "".join(drawn.choices(LETTERS, k=drawn.randint(least, longest)))

    with path.open("w") as file:
        for number in range(count):
            row = {"prompt": text(2), "chosen": f"{text(1)}+{number}", "rejected": f"{text(1)}-{number}"}
            file.write(json.dumps(row) + "\n")
    return path
