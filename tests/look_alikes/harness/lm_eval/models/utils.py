from __future__ import annotations

from typing import Any


def has_bos_prefix(text: str, prefix: str) -> bool:
    return text.startswith(prefix)


def normalize_gen_kwargs(options: dict[str, Any], most: int) -> dict[str, Any]:
    return {"max_gen_toks": most, **options}


def postprocess_generated_text(text: str, until: list[str], _: None) -> str:
    return min((text.partition(stop)[0] for stop in until), key=len, default=text)
