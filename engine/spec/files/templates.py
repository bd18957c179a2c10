"""New profiles and recipes: commented files to start from.

A template holds the keys that users change most, each with the description from its field's docstring. It passes the
check unchanged.

Try: `tunedeck recipes new mine`, `tunedeck profiles new mine --detect`
"""

from __future__ import annotations

from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Table as TomlTable

from engine.spec.schema import describe
from engine.spec.schema.data import Data, Source
from engine.spec.schema.profile import Device, Profile
from engine.spec.schema.recipe import Checkpoint, Eval, Method, Model, Recipe, Train

Values = dict[str, Any]

RECIPE_TABLES: tuple[tuple[str, type[BaseModel], Values], ...] = (
    ("model", Model, {"id": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "auto", "quantize": "none"}),
    ("method", Method, {"kind": "lora", "rank": 16, "targets": "all-linear", "dropout": 0.0}),
    (
        "train",
        Train,
        {"epochs": 1.0, "batch_size": 16, "micro_batch": "auto", "learning_rate": 2e-4, "warmup_ratio": 0.03},
    ),
    ("checkpoint", Checkpoint, {"every_minutes": 30.0, "keep": 2}),
    ("eval", Eval, {"metrics": ["loss"]}),
)
DATA: Values = {"max_length": 2048, "over_length": "drop", "packing": False, "valid_fraction": 0.0}
SOURCE: Values = {"name": "main", "path": "data/train.jsonl", "format": "auto"}


def new_recipe(name: str) -> str:
    """The text of a commented recipe with this name."""
    document = _head("recipe", name, "My recipe", Recipe)
    for key, model, values in RECIPE_TABLES:
        document[key] = _table(model, values)
        if key == "method":
            data = _table(Data, DATA)
            sources = tomlkit.aot()
            sources.append(_table(Source, SOURCE))
            data["sources"] = sources
            document["data"] = data
    return tomlkit.dumps(document)


def new_profile(name: str, device: Values, *, title: str, notes: str) -> str:
    """The text of a commented hardware profile with this name; `device` has the keys of its [device] table."""
    document = _head("profile", name, title, Profile)
    document["notes"] = notes
    document["device"] = _table(Device, device)
    return tomlkit.dumps(document)


def _head(kind: str, name: str, title: str, model: type[BaseModel]) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    document.add(tomlkit.comment(f"{model.__doc__}  Check it with: tunedeck {kind}s check {name}"))
    for key, value in {"schema": 1, "kind": kind, "title": title}.items():
        document[key] = value
    return document


def _table(model: type[BaseModel], values: Values) -> TomlTable:
    table = tomlkit.table()
    for key, value in values.items():
        table.add(tomlkit.comment(describe.description_of(model, key).replace("\n", " ")))
        table[key] = value
    return table
