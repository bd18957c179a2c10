"""The table that `make torture` ends with: what was done to Tunedeck, how often, and what was lost.

Each part records its rows in the file $TUNEDECK_TORTURE, if that is set. Not a test module. Try:
`TUNEDECK_TORTURE=/tmp/rows python -P -m tests.fuzz.run --inputs 500; python -m tests.torture_table /tmp/rows`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

VARIABLE = "TUNEDECK_TORTURE"

PARTS = ("allocations", "kills", "writes", "files by strangers")
"""What a whole `make torture` consists of."""

say = partial(print, flush=True)


@dataclass(frozen=True)
class Row:
    """One kind of torture."""

    part: str
    what: str
    times: int
    lost: int


def record(part: str, what: str, times: int, lost: int) -> None:
    """Add a row to the table, if one is being made."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(Row(part, what, times, lost))) + "\n")


def print_table(rows: Sequence[Row]) -> int:
    """Print it; returns 1 if something was lost or a part is missing."""
    say(f"{'part':<20}{'what was done':<44}{'tried':>11}{'survived':>11}{'lost':>7}")
    for row in rows:
        say(f"{row.part:<20}{row.what:<44}{row.times:>11,}{row.times - row.lost:>11,}{row.lost:>7,}")
    lost, missing = sum(row.lost for row in rows), [part for part in PARTS if part not in {row.part for row in rows}]
    tried = sum(row.times for row in rows)
    say(f"{'all':<64}{tried:>11,}{tried - lost:>11,}{lost:>7,}")
    if missing:
        say(f"missing, because it ended early: {', '.join(missing)}")
    return 1 if lost or missing else 0


def main() -> int:
    """Print the table of a file of rows."""
    lines = Path(sys.argv[1]).read_text().splitlines() if Path(sys.argv[1]).exists() else []
    return print_table([Row(**json.loads(line)) for line in lines])


if __name__ == "__main__":
    sys.exit(main())
