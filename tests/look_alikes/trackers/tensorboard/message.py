"""Stands in for protobuf's messages: keyword fields, serialised as JSON."""

from __future__ import annotations

import json
from typing import Any


class Message:
    """A message with any fields."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def SerializeToString(self) -> bytes:
        return json.dumps(self.fields, default=_plain).encode()


def _plain(value: Any) -> Any:
    return value.fields if isinstance(value, Message) else value.decode()
