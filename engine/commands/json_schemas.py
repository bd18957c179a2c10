"""`tunedeck schema`: the JSON Schema of what programs read: the documents of plan, advise and runs, and events.

A field that is listed here stays, with this type, until VERSION changes; new ones may come at any time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from engine.commands.shared import print_json
from engine.journal.event_schema import COMMON, EVENT_KINDS

VERSION = 1
DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

TYPES: dict[str, Schema] = {
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "table": {"type": "object"},
    "figures": {"type": "object", "additionalProperties": {"type": "number"}},
    "texts": {"type": "array", "items": {"type": "string"}},
    "tables": {"type": "array", "items": {"type": "object"}},
    "prediction": {"type": ["object", "number", "null"]},
    "measured": {"type": "object"},
    "utilisation": {"type": "object"},
    "any": {},
}
"""The types of `engine.journal.event_schema`, and `figures`: a table of numbers."""

PLAN = (
    "verdict:text capacity_bytes:whole peak_bytes:whole device_bytes:whole margin_bytes:whole deciding_phase:text"
    " components:figures reserved_context_bytes:whole host_bytes:whole host_components:figures"
    " host_capacity_bytes:whole? phases:table micro_batch:whole accumulation:whole tokens_per_micro_batch:whole"
    " length:whole basis:text target_tokens:whole generate_adds_bytes:whole generation_rows:whole remedies:table"
    " learning_rate:number? layers:whole recomputed_layers:whole? time:table? ranks:whole parallel:text network:table?"
    " image_tokens:whole predicted_only:flag predictor:text simulated_seconds:number? assumed:text?"
)
TIME = "step_seconds:number tokens_per_second:number hours:number? cost:number? parts:figures basis:text"
STAGE = "name:text kind:text verdict:text? peak_bytes:whole? host_bytes:whole disk_bytes:whole plan:table?"
SUGGESTION = (
    "changes:table peak_bytes:whole margin_bytes:whole host_bytes:whole micro_batch:whole slower_percent:number"
    " tokens_per_second:number? changes_learning:flag changes_arithmetic:flag notes:texts"
)
RUN = (
    "run:text path:text name:text status:text step:whole max_steps:whole? metrics:table backoffs:whole model:text"
    " profile:text recipe:text simulated:flag started:text? updated:text? damaged_lines:whole problems:texts"
)

MODEL = "name:text ids:texts parameters:whole answers:tables"
ANSWER = (
    "method:text recipe:text profile:text trains:flag length:whole? longest:whole? micro_batch:whole?"
    " tokens_per_second:number? settings:table? peak_bytes:whole? predictor:text? reason:text?"
)


def _table(fields: str, **tables: Schema) -> Schema:
    """Of "name:type" words, "?" after a type that may be null; `tables` has the schemas of fields that are tables."""
    words = dict(word.split(":") for word in fields.split())
    return {
        "type": "object",
        "required": list(words),
        "properties": {
            name: _or_null(tables[name], kind) if name in tables else _of_type(kind) for name, kind in words.items()
        },
    }


def _of_type(kind: str) -> Schema:
    return _or_null(TYPES[kind.removesuffix("?")], kind)


def _or_null(schema: Schema, kind: str) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if kind.endswith("?") and schema else schema


def _plan() -> Schema:
    one = _table(PLAN, time=_table(TIME))
    return {**one, "properties": {**one["properties"], "verdict": {"enum": ["fits", "fits_smaller", "does_not_fit"]}}}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _events() -> Schema:
    """Of one line of events.jsonl, or of `train --json`. Kinds that a newer version adds pass."""
    common = {"seq": "whole", "time": "text", "kind": "text", "stage": "text", "rank": "whole", "stage_seq": "whole"}
    assert common.keys() == COMMON
    kinds = []
    for name, kind in EVENT_KINDS.items():
        required = {field: _of_type(each) for field, each in kind.required.items()}
        optional = {field: _of_type(each.removesuffix("?") + "?") for field, each in kind.optional.items()}
        then = {"required": list(kind.required), "properties": {**required, **optional}}
        kinds.append({"if": {"properties": {"kind": {"const": name}}}, "then": then})
    return {
        "type": "object",
        "required": ["seq", "time", "kind"],
        "properties": {name: _of_type(each) for name, each in common.items()},
        "allOf": kinds,
    }


Document = Literal["plan", "advise", "runs", "models", "events"]


def json_schema(document: Document) -> Schema:
    if document == "plan":
        stage = _table(STAGE, plan=_plan())
        staged = {
            "type": "object",
            "required": ["verdict", "stages"],
            "properties": {"verdict": TYPES["text"], "stages": _list_of(stage)},
        }
        point = {"type": "object", "required": ["name", "plan"], "properties": {"name": TYPES["text"], "plan": _plan()}}
        swept = {"type": "object", "required": ["points"], "properties": {"points": _list_of(point)}}
        found: Schema = {"anyOf": [_plan(), staged, swept]}
    elif document == "advise":
        suggestions = _list_of(_table(SUGGESTION))
        found = {
            "type": "object",
            "required": ["plan", "suggestions", "room"],
            "properties": {"plan": _plan(), "suggestions": suggestions, "room": suggestions},
        }
    elif document == "models":
        found = _list_of(_table(MODEL, answers=_list_of(_table(ANSWER))))
    else:
        found = _list_of(_table(RUN)) if document == "runs" else _events()
    return {"$schema": DIALECT, "$id": f"urn:tunedeck:{document}:{VERSION}", "version": VERSION, **found}


def schema(
    document: Annotated[
        Document,
        typer.Argument(
            metavar="plan|advise|runs|models|events",
            help="A command whose --json output to describe, or events for the lines of events.jsonl.",
        ),
    ],
) -> None:
    """Print the JSON Schema of --json output or of a run's events."""
    print_json(json_schema(document))
