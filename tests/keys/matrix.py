"""Changes every key of recipe and profile in every branch of a run, and looks for keys that do nothing.

    python -P -m tests.keys.matrix [--branches lora,full] [--keys train.,eval.] [--share N]

A cell is a key in a branch. Its values are made from the key's type (`tests.keys.values`). Each of them must change
what can be observed (`tests.keys.observe`), be rejected, or be noted by the key's name; of a key with fixed words or
numbers one value that acts or is rejected is enough, because another one may be what the default stands for. Where a
value is rejected with `KEY = VALUE is needed`, or does nothing, the cell is tried with settings of other keys, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.schema.base import Table
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.errors import TunedeckError
from tests import fork_server
from tests.keys.branches import Branch, make_branches, resumed_to_the_end
from tests.keys.observe import Seen
from tests.keys.values import ENTRY, Key, candidates, keys_of, toml_of

NEEDED = re.compile(r"([a-z_]+(?:\.[a-z_]+)*) = (\"[^\"]*\"|[\w.]+) (?:is needed|needs it)")
"""What a rejected value asks for."""


@dataclass
class Cell:
    """A key in a branch."""

    branch: str
    key: str
    outcomes: dict[str, str] = field(default_factory=dict)
    """What became of each value: acted, rejected, noted, silent, or crashed, with the setting that it needed; or
    stated, where the schema says that the key changes neither plan nor result."""
    details: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """acted, rejected, noted, stated, or fault."""
        kinds = Counter(outcome.partition(" ")[0] for outcome in self.outcomes.values())
        is_read = not self.is_open and len(kinds) > (kinds["silent"] > 0)
        if kinds["crashed"] or (kinds["silent"] and not is_read):
            return "fault"
        return next((kind for kind in ("acted", "noted", "rejected", "stated") if kind in kinds), "fault")

    is_open: bool = False


class Matrix:
    """Cells, decided one after the other; what was observed of a spec is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.branches = make_branches(folder / "files")
        self._seen: dict[str, Seen | TunedeckError] = {}
        self._number = 0

    def cells(self, branches: Sequence[str] = (), prefixes: Sequence[str] = ("",)) -> Iterator[tuple[Branch, Key]]:
        """Every key in every branch."""
        for name in branches or list(self.branches):
            for model in (Recipe, Profile):
                # Entries of sources are alike wherever they are: all of them where one branch trains and one scores.
                for key in keys_of(model, walked=None if name in ("lora", "evaluated") else set()):
                    if key.name.startswith(tuple(prefixes)):
                        yield self.branches[name], key

    def decide(self, branch: Branch, key: Key) -> Cell:
        """Try the values of a key."""
        cell = Cell(branch.name, key.name, is_open=key.is_open)
        if key.is_stated:
            cell.outcomes["any"] = "stated"
            return cell
        spec = branch.resolve([], self.folder).spec
        for place, now in _places(key, spec):
            for value in candidates(key, branch.words, now):
                text = f"{place}={toml_of(value)}"
                outcome, detail = self._try(branch, key, text, [])
                needed = NEEDED.search(detail) if outcome == "rejected" else None
                others = [_setting(needed, place)] if needed else branch.others if outcome == "silent" else ()
                for setting in others:
                    again, more = self._try(branch, key, text, [setting])
                    if again not in ("rejected", "silent"):
                        outcome, detail = f"{again} with {setting}", more
                cell.outcomes[text], cell.details[text] = outcome, detail
                if not key.is_open and outcome.startswith(("acted", "noted")):
                    return cell
        return cell

    def _try(self, branch: Branch, key: Key, text: str, given: list[str]) -> tuple[str, str]:
        try:
            if branch.resumed is not None:
                return self._try_resume(branch, key, text, given)
            base, changed = branch.resolve(given, self.folder), branch.resolve([*given, text], self.folder)
        except TunedeckError as error:
            return "rejected", error.render()
        if _names(key, [note for note in changed.notices if note not in base.notices]):
            return "noted", " ".join(changed.notices)
        return self._compare(branch, key, base.spec, changed.spec)

    def _compare(self, branch: Branch, key: Key, base: RunSpec, changed: RunSpec) -> tuple[str, str]:
        for observation in branch.observations:
            before, after = (self._observe(observation, each) for each in (base, changed))
            if isinstance(after, TunedeckError):
                same = isinstance(before, TunedeckError) and before.render() == after.render()
                if not same:
                    return "rejected", after.render()
                continue
            if isinstance(before, TunedeckError):
                return "acted", observation.__name__
            if after.crashed and not before.crashed:
                return "crashed", after.crashed
            if _names(key, [note for note in after.texts if note not in before.texts]):
                return "noted", " ".join(after.texts)
            if after.value != before.value:
                return "acted", observation.__name__
        return "silent", ""

    def _try_resume(self, branch: Branch, key: Key, text: str, given: list[str]) -> tuple[str, str]:
        folder = self._fresh()
        notices, place = branch.resume([*given, text], folder)
        if _names(key, notices):
            return "noted", " ".join(notices)
        after = resumed_to_the_end(place)
        base = self._seen.get(f"resumed {given}")
        if base is None:
            base = self._seen[f"resumed {given}"] = resumed_to_the_end(branch.resume(given, self._fresh())[1])
        assert isinstance(base, Seen)
        if after.crashed and not base.crashed:
            return "crashed", after.crashed
        if after.value != base.value:
            return "acted", "resume"
        specs = [branch.resolve([*given, *more], folder).spec for more in ([], [text])]
        return self._compare(branch, key, *specs)

    def _observe(self, observation: Any, spec: RunSpec) -> Seen | TunedeckError:
        same = f"{observation.__name__} {spec.model_dump_json(exclude={'provenance'})}"
        if same not in self._seen:
            try:
                with _quiet():
                    self._seen[same] = observation(spec, self._fresh())
            except TunedeckError as error:
                self._seen[same] = error
        return self._seen[same]

    def _fresh(self) -> Path:
        self._number += 1
        return self.folder / "work" / str(self._number)


def _places(key: Key, spec: RunSpec) -> list[tuple[str, Any]]:
    """Where `--set` finds a key, with the value that it has: in each entry of a list of tables, by its name."""
    root = (
        spec.profile
        if key.parts[0] in Profile.model_fields and key.parts[0] not in Recipe.model_fields
        else spec.recipe
    )
    found: list[tuple[str, Any]] = [("", root)]
    for part in key.parts:
        if part == ENTRY:
            found = [
                (f"{place}.{getattr(each, 'name', index)}", each)
                for place, entries in found
                for index, each in enumerate(entries or ())
            ]
        else:
            found = [(f"{place}.{part}".lstrip("."), _value(table, part)) for place, table in found]
    return found


def _value(table: Any, name: str) -> Any:
    if not isinstance(table, Table):
        return None
    own = next((own for own, each in type(table).model_fields.items() if (each.alias or own) == name), name)
    return getattr(table, own)


def _setting(needed: re.Match[str], place: str) -> str:
    """The setting that an error asks for; without a table's name it is of the same table."""
    name, value = needed.groups()
    whole = name if "." in name else f"{place.rpartition('.')[0]}.{name}"
    return f"{whole}={value}"


def _names(key: Key, texts: list[str]) -> bool:
    """Whether a text names the key, by its table and name."""
    dotted = ".".join(part for part in key.parts if part != ENTRY)
    in_table = f"[{key.parts[0]}]", f"{key.parts[-1]} ="
    if any(all(part in text for part in in_table) for text in texts):
        return True
    return any(dotted in text or f"{'.'.join(dotted.split('.')[-2:])}" in text for text in texts)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
    logging.disable(logging.NOTSET)


def in_share(branch: Branch, key: Key, share: int) -> bool:
    """Whether a cell is one of those that a part of the matrix has: one in `share`, always the same ones."""
    digest = hashlib.sha256(f"{branch.name} {key.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % share == 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Decide the cells and print what became of them; returns 1 if a key does nothing in a branch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--branches", default="")
    parser.add_argument("--keys", default="")
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--json", default="")
    asked = parser.parse_args(arguments)
    done: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="tunedeck-keys-") as folder:
        for name in ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME"):
            os.environ[name] = str(Path(folder, name.lower()))
        with _quiet():
            matrix = Matrix(Path(folder))
        gc.collect()
        gc.freeze()
        branches = [name for name in asked.branches.split(",") if name]
        for branch, key in matrix.cells(branches, asked.keys.split(",")):
            if not in_share(branch, key, asked.share):
                continue
            began = time.monotonic()
            cell = matrix.decide(branch, key)
            if not cell.outcomes:
                continue
            done.append(cell)
            if cell.verdict == "fault" or time.monotonic() - began > 30:
                _say(f"{cell.verdict} {branch.name}: {key.name} ({time.monotonic() - began:.0f} s)")
                for text, outcome in cell.outcomes.items():
                    if cell.verdict == "fault":
                        _say(
                            f"    {outcome:10} {text[:90]}  {cell.details[text][:160] if outcome == 'crashed' else ''}"
                        )
    if asked.json:
        Path(asked.json).write_text(json.dumps([vars(cell) for cell in done], indent=1))
    _say(summary(done))
    return int(any(cell.verdict == "fault" for cell in done))


def summary(done: list[Cell]) -> str:
    """A table: a line for each branch, and the sum."""
    lines = ["branch        cells  acted  rejected  noted  stated  faults"]
    for name in [*dict.fromkeys(cell.branch for cell in done), "all"]:
        counts = Counter(cell.verdict for cell in done if name in (cell.branch, "all"))
        kinds = {"acted": 6, "rejected": 9, "noted": 6, "stated": 7, "fault": 7}
        numbers = f"{counts.total():6} " + " ".join(f"{counts[kind]:{width}}" for kind, width in kinds.items())
        lines.append(f"{name:12} {numbers}")
    values = sum(len(cell.outcomes) for cell in done)
    return "\n".join([*lines, f"{values} values"])


if __name__ == "__main__":
    fork_server.install()
    sys.exit(main(sys.argv[1:]))
