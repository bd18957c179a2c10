"""Reads another tool's YAML file as plain data: no tags, no aliases, no code, and within bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engine.config.files.document import decode_utf8, read_bytes
from engine.config.files.text import visible
from engine.errors import SpecError

MAX_DEPTH = 20
MAX_EVENTS = 20_000
"""Values, keys, starts and ends of lists and mappings; the longest example of the tools we read has 600."""

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d+")
REFERENCE = re.compile(r"\$\{(\w+)\}")


def read_yaml(path: Path) -> tuple[dict[str, Any], str]:
    """The mapping that a YAML file holds, and its text. Raises SpecError with file and line."""
    label = visible(str(path))
    text = decode_utf8(read_bytes(path, label), label)
    return parse_yaml(text, label), text


def parse_yaml(text: str, label: str) -> dict[str, Any]:
    """Numbers such as 2e-5, which YAML 1.1 reads as text, are numbers, and `${key}` is the value of that key."""
    import yaml  # only for files of other tools

    try:
        _require_plain(yaml.parse(text, yaml.SafeLoader), label)
        _require_unique(yaml.compose(text, yaml.SafeLoader), label)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "unreadable"
        raise SpecError([f"{label}{line}: not YAML: {visible(str(reason))}"]) from None
    except ValueError as error:  # dates and numbers that no calendar and no computer has
        raise SpecError([f"{label}: not YAML: {visible(str(error))[:100]}"]) from None
    if not isinstance(data, dict):
        raise SpecError([f"{label}: no keys with values; a configuration of another tool is needed"])
    top = {str(key): value for key, value in data.items()}
    return {key: _plain(value, top) for key, value in top.items()}


def _require_plain(events: Any, label: str) -> None:
    depth = 0
    for count, event in enumerate(events):
        kind = type(event).__name__
        line = event.start_mark.line + 1
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > MAX_DEPTH or count > MAX_EVENTS:
            raise SpecError([f"{label}:{line}: nested too deeply or too long for a training configuration"])
        if kind == "AliasEvent":
            raise SpecError([f"{label}:{line}: an alias (*{visible(event.anchor)})"], fix="write the value out")
        if getattr(event, "tag", None):
            raise SpecError(
                [f"{label}:{line}: a tag ({visible(event.tag)[:60]}), which can name code"], fix="remove the tag"
            )


def _require_unique(node: Any, label: str) -> None:
    """`node`: a node of PyYAML. Of a key that is given twice YAML readers keep the last one without a word."""
    pairs = node.value if node is not None and isinstance(node.value, list) else []
    seen: set[str] = set()
    for pair in pairs:
        key, value = pair if isinstance(pair, tuple) else (None, pair)
        if key is not None:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise SpecError([f"{label}:{line}: {visible(name)[:60]} is given twice"], fix="remove one of them")
            seen.add(name)
        _require_unique(value, label)


def _plain(node: Any, top: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {str(key): _plain(value, top) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, top) for value in node]
    if isinstance(node, str):
        whole = REFERENCE.fullmatch(node)
        known = top.get(whole[1]) if whole else None
        if isinstance(known, (int, float)):
            return known
        text = REFERENCE.sub(lambda hit: top[hit[1]] if _is_word(top.get(hit[1])) else hit[0], node)
        return float(text) if NUMBER.fullmatch(text) else text
    return node if node is None or isinstance(node, (bool, int, float)) else str(node)


def _is_word(value: Any) -> bool:
    """Short enough that many references to it stay small."""
    return isinstance(value, str) and len(value) <= 200
