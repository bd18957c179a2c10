"""Small recipes and profiles that work, with pieces of their text replaced, and runs made from them."""

from __future__ import annotations

import json
from pathlib import Path

from engine.budget.advise.plan import make_plan
from engine.config.load import dump_run_spec, resolve
from engine.journal.directory import RunDirectory, create_run_directory

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
    """Write a valid recipe with some pieces of its text replaced (pairs of old and new text), and its data beside it
    (None: no data file). Returns the recipe's path."""
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
    """Write a profile of a plain CPU with some pieces of its text replaced (pairs of old and new text). Returns its
    path."""
    text = PROFILE.format(name=name)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text, "utf-8")
    return path


def make_run(folder: Path, recipe: Path, *overrides: str) -> RunDirectory:
    """Create a run directory as `train` does, without starting its engine."""
    spec = resolve(str(write_profile(folder)), str(recipe), overrides).spec
    return create_run_directory(folder / "runs", spec.name, dump_run_spec(spec), make_plan(spec).as_json())
