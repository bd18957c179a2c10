"""The fields of the Launch screen: which keys of profile and recipe have a row, in which order, and how each is shown.

Data, and pure functions from a run spec to rows. What a key allows and means is read off the spec's own types.

Try: `python -c "from tui.launch.fields import FIELDS; print([field.key for field in FIELDS])"`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.spec.files.rewrite import kind_of_table
from engine.spec.files.text import visible
from engine.spec.schema import describe
from engine.spec.schema.recipe import Source
from engine.spec.schema.run import RunSpec

DEVICES = "--devices"
NAME = "--name"
OTHER = "--set"
"""The row that takes any other key."""

HUB = "hub:"
"""How a data set on the hub is written in a data row."""

SOURCES = "data.sources."


class Field(NamedTuple):
    """One key with a row of its own."""

    key: str
    label: str
    shown_for: Callable[[RunSpec], bool] = lambda spec: True


def _lora(spec: RunSpec) -> bool:
    return spec.recipe.method.kind == "lora"


def _cuda(spec: RunSpec) -> bool:
    return spec.profile.device.kind == "cuda"


FIELDS: tuple[Field, ...] = (
    Field("model.id", "model"),
    Field(SOURCES, "data"),
    Field("data.max_length", "max length"),
    Field("train.batch_size", "batch"),
    Field("train.micro_batch", "micro-batch"),
    Field("method.rank", "rank", _lora),
    Field("train.learning_rate", "learning rate"),
    Field("train.epochs", "epochs"),
    Field("train.max_steps", "max steps"),
    Field("train.gradient_checkpointing", "checkpointing"),
    Field("method.kind", "method"),
    Field("method.adapter_dtype", "adapter dtype", _lora),
    Field("model.quantize", "quantize", _cuda),
    Field("model.dtype", "dtype"),
    Field("train.loss", "loss"),
    Field("train.optimizer", "optimizer"),
    Field("train.scheduler", "scheduler"),
    Field("train.warmup_ratio", "warm-up ratio"),
    Field("train.warmup_steps", "warm-up steps"),
    Field("train.weight_decay", "weight decay"),
    Field("train.max_grad_norm", "clip norm"),
    Field("train.seed", "seed"),
    Field("data.packing", "packing"),
    Field("data.over_length", "over length"),
    Field("data.loss_on", "loss on"),
    Field("data.valid_fraction", "validation"),
    Field("checkpoint.every_steps", "checkpoint"),
    Field("eval.every_steps", "evaluate"),
    Field("device.memory_gib", "memory GiB"),
    Field("device.reserve_gib", "reserve GiB"),
    Field(DEVICES, "devices", _cuda),
    Field(NAME, "run name"),
)

SPECIAL_HELP = {
    DEVICES: "Which GPUs of this machine: indices such as 0 or 2,3; empty takes the first ones.",
    NAME: "The run's name; empty takes the recipe's.",
    OTHER: "Any other key: KEY=VALUE as after --set, such as train.label_smoothing=0.1",
    SOURCES: "A file, folder or glob, or hub:OWNER/NAME for a data set on the hub.",
}


class Row(NamedTuple):
    """One row as it stands: its key, label and value, and what the hint line says of it."""

    key: str
    label: str
    value: str
    """As it would be typed; empty where nothing is set."""
    beside: str = ""
    """Shown after the value: what "auto" was resolved to, or what stands in for nothing."""
    changed: bool = False
    """Whether it differs from the file."""


def rows_of(
    spec: RunSpec | None, written: Mapping[str, str], options: Mapping[str, str], cwd: Path, also: Sequence[str] = ()
) -> list[Row]:
    """Every row, for a spec that was resolved with the overrides `written`; `options` are --devices and --name.

    `also` are keys that need a row whatever the spec: those with something wrong. With no spec at all, only they, what
    is written and the row for any key are there: enough to mend it.
    """
    needed = {*written, *also, *(key for key, value in options.items() if value)}
    rows = [row for field in FIELDS for row in _rows_of_field(field, spec, written, options, cwd, needed)]
    known = {row.key for row in rows}
    others = [key for key in sorted(needed, key=list(needed).index) if key not in known and source_of(key) not in known]
    typed = [Row(key, key, written.get(key) or _value(spec, key), "", key in written) for key in others]
    return [*rows, *typed, Row(OTHER, "any other key", "")]


def _rows_of_field(
    field: Field, spec: RunSpec | None, written: Mapping[str, str], options: Mapping[str, str], cwd: Path,
    needed: set[str],
) -> list[Row]:  # fmt: skip
    """No row, one, or for the data one for each source."""
    if field.key not in needed and (spec is None or not field.shown_for(spec)):
        return []
    if field.key == SOURCES:
        return [_source_row(source, written, cwd) for source in spec.recipe.data.sources] if spec is not None else []
    if field.key in (DEVICES, NAME):
        value = options.get(field.key, "")
        return [Row(field.key, field.label, value, "" if value else _stand_in(field.key, spec), bool(value))]
    return [Row(field.key, field.label, written.get(field.key, _value(spec, field.key)), "", field.key in written)]


def _value(spec: RunSpec | None, key: str) -> str:
    return "" if spec is None else as_typed(value_of(spec, key))


def _source_row(source: Source, written: Mapping[str, str], cwd: Path) -> Row:
    key = SOURCES + source.name
    path, hub = written.get(f"{key}.path"), written.get(f"{key}.hub")
    label = f"data {source.name}" if len(source.name) <= 9 else "data"
    if path is not None or hub is not None:
        return Row(key, label, path if path is not None else HUB + str(hub), "", True)
    value = HUB + source.hub if source.hub else near(source.path or "", cwd)
    return Row(key, label, value, "" if source.enabled else "(off)")


def near(path: str, cwd: Path) -> str:
    """A path below the working directory as it would be typed there."""
    inside = os.path.isabs(path) and os.path.commonpath([path, cwd]) == str(cwd)
    return os.path.relpath(path, cwd) if inside else path


def source_of(key: str) -> str:
    """The data row that shows this override, or the key itself."""
    head, _, last = key.rpartition(".")
    return head if key.startswith(SOURCES) and last in ("path", "hub") else key


def overrides_of(row: str, text: str) -> dict[str, str]:
    """The overrides that a text in a row stands for; the row's other ones go."""
    if not row.startswith(SOURCES):
        return {row: text}
    return {f"{row}.hub": text.removeprefix(HUB)} if text.startswith(HUB) else {f"{row}.path": text}


def _stand_in(key: str, spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    if key == NAME:
        return spec.recipe.name
    count = spec.profile.device.count
    return "the first" if count == 1 else f"the first {count}"


def value_of(spec: RunSpec, key: str) -> Any:
    """The value under a dotted key of profile or recipe; None where the key leads nowhere."""
    node: Any = spec.profile if kind_of_table(key.partition(".")[0]) == "profile" else spec.recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def as_typed(value: Any) -> str:
    """A value as one would type it after --set K=."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return visible(value) if isinstance(value, str) else str(value)


def choices(key: str) -> list[str]:
    """The values a key cycles through; empty where it is typed."""
    place = tuple(key.split("."))
    allowed = describe.allowed_at(_model(key), place)
    if allowed == "true or false":
        return ["true", "false"]
    words = describe.choices_at(_model(key), place)
    return words if len(words) > 1 and " or " not in allowed else []


def help_of(key: str) -> str:
    """What the key means and allows, in a line."""
    if key.startswith(SOURCES) and key.count(".") == 2:
        return SPECIAL_HELP[SOURCES]
    if key in SPECIAL_HELP:
        return SPECIAL_HELP[key]
    place = tuple(key.split("."))
    table = describe.table_at(_model(key), place[:-1])
    field = describe.fields_of(table).get(place[-1]) if table else None
    if field is None:
        return key
    return field.description or ""


def _model(key: str) -> Any:
    from engine.spec.schema.profile import Profile
    from engine.spec.schema.recipe import Recipe

    return Profile if kind_of_table(key.partition(".")[0]) == "profile" else Recipe
