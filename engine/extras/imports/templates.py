"""Chat templates that other tools name: which is the model's own, which is one of ours, and which the user must see."""

from __future__ import annotations

import re
from typing import Any

from engine.config.files.text import quoted
from engine.extras.imports.draft import Draft

NAMED = ("chatml", "llama3", "gemma", "phi3", "mistral")
"""Names that model.chat_template has, too."""


def take_template(draft: Draft, key: str, names: dict[str, str | None]) -> None:
    """Account for the chat template that a tool names. `names`: its names to ours; None: the model's own template."""
    given = draft.take(key)
    if given in (None, "", [], {}):
        return
    name = names.get(str(given), str(given))
    if name is None:
        draft.leave(key, f"{quoted(given)}: the model's template is used")
    elif name in NAMED or "{%" in name:
        draft.set("model.chat_template", name, key)
    elif is_of_family(name, str(draft.theirs.get("base_model") or draft.get("model.id") or _model_of(draft))):
        draft.leave(key, f"{quoted(given)}: the model's template is used")
        draft.notes.append(
            f"{draft.tool} renders {given} with its own copy of the template: compare a row with `tunedeck data`"
        )
    else:
        draft.blanks[key] = (
            f"{quoted(given)}: unknown template; the model's template is used unless you set model.chat_template"
        )


def _model_of(draft: Draft) -> Any:
    return draft.theirs.get("model_name_or_path") or draft.theirs.get("model") or ""


def is_of_family(template: str, model: str) -> bool:
    """Whether a template's name begins as a part of the model's name does: "qwen3_vl_nothink" and Qwen/Qwen3-VL-4B."""
    letters = re.sub("[^a-z0-9]", "", model.rpartition("/")[2].lower())
    first = re.match("[a-z]+", template.lower())
    return first is not None and len(first[0]) > 2 and first[0] in letters
