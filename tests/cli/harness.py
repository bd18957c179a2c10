"""What the tests of the command line are made of: an outcome, what a complaint must look like, small recipes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from engine.budget.advise.plan import make_plan
from engine.journal.directory import RunDirectory, create_run_directory
from engine.spec.load import dump_run_spec, resolve

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move or colour a terminal; the line break and the tab are the only ones allowed."""

LONGEST_BLOCK = 12
"""Lines that still count as one short block."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    def complains(self, code: int, *words: str) -> None:
        """The exit code, and on stderr one short block that says all of these words; nothing on stdout."""
        assert self.out == ""
        assert_block(self.err, *words)
        assert self.code == code, self.err


def assert_block(text: str, *words: str) -> None:
    """One block: a first line that says who speaks, no traceback, no control characters, and these words."""
    assert text.startswith("tunedeck: "), text
    assert text.count("tunedeck: ") - text.count("fix: ") <= 1, text
    assert "Traceback" not in text, text
    assert not CONTROL.search(text), repr(text)
    assert len(text.splitlines()) <= LONGEST_BLOCK, text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


RECIPE = """\
schema = 1
kind = "recipe"
name = "{name}"

[model]
id = "builtin:tiny"
tokenizer = "builtin:bytes"
init = "random"
dtype = "float32"

[method]
kind = "full"

[data]
max_length = 64

[[data.sources]]
name = "main"
path = "data.jsonl"

[train]
max_steps = 2
batch_size = 2
micro_batch = 2
learning_rate = 1e-3
optimizer = "sgd"

[checkpoint]
every_steps = 1
"""

GOOD_DATA = "".join(json.dumps({"prompt": f"{n} plus 1 is ", "completion": str(n + 1)}) + "\n" for n in range(8))

PROFILE = """\
schema = 1
kind = "profile"
name = "{name}"

[device]
kind = "cpu"
memory_gib = 8.0
"""


def write_recipe(
    folder: Path, *changes: tuple[str, str], name: str = "mine", more: str = "", data: str | bytes | None = GOOD_DATA
) -> Path:
    """A recipe that works, with these pieces of its text replaced, and its data beside it (None: no data file)."""
    text = RECIPE.format(name=name)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    if data is not None:
        (folder / "data.jsonl").write_bytes(data.encode() if isinstance(data, str) else data)
    path = folder / f"{name}.toml"
    path.write_text(text + more, "utf-8")
    return path


def write_profile(folder: Path, *changes: tuple[str, str], name: str = "here") -> Path:
    """A profile of a plain CPU, with these pieces of its text replaced."""
    text = PROFILE.format(name=name)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text, "utf-8")
    return path


def make_run(folder: Path, recipe: Path, *sets: str) -> RunDirectory:
    """A run directory as `train` makes it, with its engine not started."""
    spec = resolve(str(write_profile(folder)), str(recipe), sets).spec
    return create_run_directory(folder / "runs", spec.name, dump_run_spec(spec), make_plan(spec).as_json())
