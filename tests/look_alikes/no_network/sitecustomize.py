"""Makes connections to other machines fail at once, in every Python process that has this folder on PYTHONPATH."""

from __future__ import annotations

import socket
from typing import Any

_connect = socket.socket.connect


def connect(self: socket.socket, address: Any) -> None:
    """Connect to sockets of this machine only."""
    if self.family != socket.AF_UNIX:
        raise ConnectionRefusedError(f"this process has no network; it asked for {address}")
    _connect(self, address)


setattr(socket.socket, "connect", connect)  # noqa: B010 - to type checkers a plain assignment is an error
