"""The fields of the Launch screen: which keys of profile and recipe have a row, in which order, and with what value.

A table, and pure functions from a run spec to rows. Allowed values and help come from the spec's schema.

Try: `python -c "from tui.launch.fields import FIELDS; print([field.key for field in FIELDS])"`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.files.text import visible
from engine.config.files.write import kind_of_table
from engine.config.schema import base
from engine.config.schema.data import Source
from engine.config.schema.run import RunSpec

PROFILE, RECIPE = "profile", "recipe"
"""The rows of the two files that are chosen; Enter opens the list of them."""

DEVICES = "--devices"
NAME = "--name"
ON_FINISH = "--on-finish"
OTHER = "--set"
"""The last row, in which any other key can be set."""

HUB = "hub:"
"""Prefix of a data set on the hub in a data row."""

SOURCES = "data.sources."

STAGES = "stages."
"""Prefix of the rows of stages, which switch a stage on or off."""


class LaunchField(NamedTuple):
    """A key of the profile or recipe with a row of its own on the Launch screen. There is no row if `shown_for` returns
    False for the run spec."""

    key: str
    label: str
    shown_for: Callable[[RunSpec], bool] = lambda spec: True
    unit: str = ""
    """Shown after a value that is set."""


def _lora(spec: RunSpec) -> bool:
    return spec.recipe.method.kind == "lora"


def _cuda(spec: RunSpec) -> bool:
    return spec.profile.device.kind == "cuda"


FIELDS: tuple[LaunchField, ...] = (
    LaunchField("model.id", "model"),
    LaunchField(SOURCES, "data"),
    LaunchField("data.max_length", "max length"),
    LaunchField("train.batch_size", "batch"),
    LaunchField("train.micro_batch", "micro-batch"),
    LaunchField("method.rank", "rank", _lora),
    LaunchField("train.learning_rate", "learning rate"),
    LaunchField("train.epochs", "epochs"),
    LaunchField("train.max_steps", "max steps"),
    LaunchField("train.gradient_checkpointing", "checkpointing", unit="of activations"),
    LaunchField("method.kind", "method"),
    LaunchField("method.adapter_dtype", "adapter dtype", _lora),
    LaunchField("model.quantize", "quantize", _cuda),
    LaunchField("model.dtype", "dtype"),
    LaunchField("train.loss", "loss"),
    LaunchField("train.optimizer", "optimizer"),
    LaunchField("train.scheduler", "scheduler"),
    LaunchField("train.warmup_ratio", "warm-up ratio"),
    LaunchField("train.warmup_steps", "warm-up steps"),
    LaunchField("train.weight_decay", "weight decay"),
    LaunchField("train.max_grad_norm", "clip norm"),
    LaunchField("train.seed", "seed"),
    LaunchField("data.packing", "packing"),
    LaunchField("data.over_length", "over length"),
    LaunchField("data.loss_on", "loss on"),
    LaunchField("data.valid_fraction", "held-out fraction"),
    LaunchField("checkpoint.every_steps", "save every", unit="steps"),
    LaunchField("eval.every_steps", "evaluate every", unit="steps"),
    LaunchField("device.memory_gib", "memory GiB"),
    LaunchField("device.reserve_gib", "reserve GiB"),
    LaunchField(DEVICES, "devices", _cuda),
    LaunchField(NAME, "run name"),
    LaunchField(ON_FINISH, "on finish"),
)

SPECIAL_HELP = {
    PROFILE: "The hardware for the plan and the run: enter or P opens the list of profiles.",
    RECIPE: "The model, the data and how it is trained: enter or R opens the list of recipes, with their verdicts.",
    DEVICES: "GPUs of this machine to use: indices such as 0 or 2,3; empty: the first ones.",
    NAME: "The run's name; empty: the recipe's name.",
    ON_FINISH: "A shell command to run after the run has ended, in any way; $TUNEDECK_STATUS has its status.",
    OTHER: "Any other key: KEY=VALUE as after --set, such as train.label_smoothing=0.1",
    STAGES: "A stage, which runs in a separate process. space skips it, or includes it again.",
    SOURCES: "A file, folder or glob, or hub:OWNER/NAME for a data set on the hub.",
}


class FieldRow(NamedTuple):
    """One row of the field list: a key with its present value."""

    key: str
    label: str
    value: str
    """The value as the user would type it; empty if none is set."""
    note: str = ""
    """Shown after the value: what "auto" was resolved to, or the default of an empty field."""
    changed: bool = False
    """Whether the value differs from the one in the file."""
    style: str = "$muted"
    """The style of the note."""

    @property
    def is_stage(self) -> bool:
        """Whether this is the row of a stage: its value says whether the stage is enabled."""
        return is_stage_row(self.key)


def field_rows(
    spec: RunSpec | None, overrides: Mapping[str, str], options: Mapping[str, str], cwd: Path,
    with_problems: Sequence[str] = (), stage_notes: Mapping[str, tuple[str, str]] | None = None,
) -> list[FieldRow]:  # fmt: skip
    """Return all rows of the field list, for a spec resolved with these overrides. `options` has the values of the
    fields that are command-line flags, `stage_notes` the note and its style of each stage by name; paths below `cwd`
    are shown relative to it.

    Keys with an override, an option or a problem always get a row. If `spec` is None, because it has errors, only these
    rows and the row for typing any other key are returned.
    """
    needed = dict.fromkeys([*overrides, *with_problems, *(key for key, value in options.items() if value)])
    rows = _stage_rows(spec, overrides, stage_notes or {})
    rows += [row for field in FIELDS for row in _rows_of_field(field, spec, overrides, options, cwd, needed)]
    known = {row.key for row in rows}
    others = [key for key in needed if key not in known and row_of_key(key) not in known]
    typed = [FieldRow(key, key, overrides.get(key) or _value(spec, key), "", key in overrides) for key in others]
    return [*rows, *typed, FieldRow(OTHER, "any other key", "", "KEY=VALUE")]


def _rows_of_field(
    field: LaunchField, spec: RunSpec | None, overrides: Mapping[str, str], options: Mapping[str, str], cwd: Path,
    needed: Container[str],
) -> list[FieldRow]:  # fmt: skip
    """Return the rows of one field: one per data source for the field of sources, else one row. Empty if the field is
    not shown for this spec, unless its key is in `needed`, the keys with an override, an option or a problem."""
    if field.key not in needed and (spec is None or not field.shown_for(spec)):
        return []
    if field.key == SOURCES:
        return [_source_row(source, overrides, cwd) for source in spec.recipe.data.sources] if spec is not None else []
    if field.key in (DEVICES, NAME, ON_FINISH):
        value = options.get(field.key, "")
        return [FieldRow(field.key, field.label, value, "" if value else _default_note(field.key, spec), bool(value))]
    value = overrides.get(field.key, _value(spec, field.key))
    return [FieldRow(field.key, field.label, value, field.unit if value else "", field.key in overrides)]


def _stage_rows(
    spec: RunSpec | None, overrides: Mapping[str, str], notes: Mapping[str, tuple[str, str]]
) -> list[FieldRow]:
    """Return a row for each stage of a staged recipe: its label is the stage's number and name, its value whether the
    stage is enabled. Its note is that of `notes` (note and style by stage name), or "off"."""
    stages = spec.recipe.stages if spec is not None else []
    width = max((len(stage.name) for stage in stages), default=0)
    rows = []
    for number, stage in enumerate(stages, 1):
        key = stage_row(stage.name)
        value = overrides.get(key, format_value(stage.enabled))
        note, style = notes.get(stage.name, ("", "$muted")) if value == "true" else ("off", "$muted")
        label = f"{number} {stage.name.ljust(width)}"
        rows.append(FieldRow(key, label, value, note, key in overrides, style))
    return rows


def stage_row(name: str) -> str:
    """Return the key of the row of the stage `name`."""
    return f"{STAGES}{name}.enabled"


def is_stage_row(key: str) -> bool:
    """Whether a key is that of a stage's row."""
    return key.startswith(STAGES) and key.endswith(".enabled")


def _value(spec: RunSpec | None, key: str) -> str:
    return "" if spec is None else format_value(value_at(spec, key))


def _source_row(source: Source, overrides: Mapping[str, str], cwd: Path) -> FieldRow:
    key = SOURCES + source.name
    path, hub = overrides.get(f"{key}.path"), overrides.get(f"{key}.hub")
    label = f"data {source.name}" if len(source.name) <= 9 else "data"
    if path is not None or hub is not None:
        return FieldRow(key, label, path if path is not None else HUB + str(hub), "", True)
    value = HUB + source.hub if source.hub else relative_to_cwd(source.path or "", cwd)
    return FieldRow(key, label, value, "" if source.enabled else "(off)")


def relative_to_cwd(path: str, cwd: Path) -> str:
    """Make a path below the working directory relative to that directory; any other path is returned unchanged."""
    inside = os.path.isabs(path) and os.path.commonpath([path, cwd]) == str(cwd)
    return os.path.relpath(path, cwd) if inside else path


def row_of_key(key: str) -> str:
    """The key of the row that shows an override of `key`, or a problem with it: for the path or hub of a data source,
    the row of the source; for what a stage starts from, the row of the stage; else `key`."""
    head, _, last = key.rpartition(".")
    if key.startswith(STAGES) and key.count(".") == 2 and last == "from":
        return f"{head}.enabled"
    return head if key.startswith(SOURCES) and last in ("path", "hub") else key


def overrides_from(row: str, text: str) -> dict[str, str]:
    """The overrides that result from typing `text` into a row; the row of a data source sets the source's `path` or
    `hub`."""
    if not row.startswith(SOURCES):
        return {row: text}
    return {f"{row}.hub": text.removeprefix(HUB)} if text.startswith(HUB) else {f"{row}.path": text}


def _default_note(key: str, spec: RunSpec | None) -> str:
    """Return the note of the row `key` (run name, device list or command at the end) while it is empty: the value that
    is used instead."""
    if spec is None or key == ON_FINISH:
        return ""
    if key == NAME:
        return spec.recipe.name
    count = spec.profile.device.count
    return "the first" if count == 1 else f"the first {count}"


def value_at(spec: RunSpec, key: str) -> Any:
    """The value under a dotted key of the profile or recipe; None if there is no such key."""
    node: Any = spec.profile if kind_of_table(key.partition(".")[0]) == "profile" else spec.recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def format_value(value: Any) -> str:
    """Format a value as the user would type it after --set KEY=."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return visible(json.dumps(value, ensure_ascii=False))
    return visible(value) if isinstance(value, str) else str(value)


def allowed_values(key: str) -> list[str]:
    """The values through which Enter cycles; empty for a key whose value is typed."""
    if is_stage_row(key):
        return ["true", "false"]
    place = tuple(key.split("."))
    allowed = base.allowed_at(_model(key), place)
    if allowed == "true or false":
        return ["true", "false"]
    words = base.choices_at(_model(key), place)
    return words if len(words) > 1 and " or " not in allowed else []


def field_help(key: str) -> str:
    """Return the description of a key from the schema of profiles and recipes."""
    if key.startswith(SOURCES) and key.count(".") == 2:
        return SPECIAL_HELP[SOURCES]
    if key in SPECIAL_HELP:
        return SPECIAL_HELP[key]
    if is_stage_row(key):
        return SPECIAL_HELP[STAGES]
    place = tuple(key.split("."))
    table = base.table_at(_model(key), place[:-1])
    return (base.description_of(table, place[-1]) if table is not None else "") or key


def _model(key: str) -> Any:
    from engine.config.schema.recipe import Recipe
    from engine.config.schema.run import Profile

    return Profile if kind_of_table(key.partition(".")[0]) == "profile" else Recipe
