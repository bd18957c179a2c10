"""What this user has allowed his runs: their [limits], with commands and trust, as he gave them, and where they may
send something. It is kept in his own state folder, because a run directory may be another user's, or be written by
him."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from engine.errors import EnvironmentProblem

FILE = "limits.jsonl"
DESTINATIONS_FILE = "destinations"


def state_folder() -> Path:
    """What this user's runs leave for later ones: $TUNEDECK_STATE, else the platform's folder for user state."""
    given = os.environ.get("TUNEDECK_STATE")
    if given:
        return Path(given).expanduser().absolute()
    return _platform_folder(os.environ.get("HOME"), os.environ.get("XDG_STATE_HOME"))


@lru_cache(maxsize=8)
def _platform_folder(home: str | None, state: str | None) -> Path:
    """Cached, because every plan asks; the arguments are the variables on which the folder depends."""
    from platformdirs import user_state_dir

    return Path(user_state_dir("tunedeck", appauthor=False))


def keep_limits(run_toml: Path, text: str) -> None:
    """Record that this user gave the limits of a run spec, `text`, which is written to `run_toml`. Raises
    EnvironmentProblem if there are limits and they cannot be recorded."""
    limits = tomli.loads(text).get("limits", {})
    if not any(limits.values()):
        return
    given = ", ".join(name for name, value in limits.items() if value)
    _append(FILE, _line(run_toml, limits), f"your permissions for this run ({given})")


def _append(name: str, line: bytes, what: str) -> None:
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab", buffering=0) as file:
            file.write(line)  # one write: lines of two starts at once do not mix
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} cannot be recorded in {folder}: {error.strerror or error}",
            fix="make the folder writable, or set TUNEDECK_STATE to a writable one",
        ) from error


def are_kept(run_toml: Path, limits: dict[str, Any]) -> bool:
    """Whether this user gave the run these limits. A record that another user wrote does not count."""
    return _has(FILE, _line(run_toml, limits))


def _has(name: str, line: bytes) -> bool:
    try:
        with (state_folder() / name).open("rb") as file:
            return os.fstat(file.fileno()).st_uid == os.geteuid() and line in file.readlines()
    except OSError:
        return False


def keep_destination(key: str, target: str) -> None:
    """Record that this user's runs may send what `key` sends to `target`. Raises EnvironmentProblem if it cannot be
    recorded."""
    if not is_kept_destination(key, target):
        _append(DESTINATIONS_FILE, _digest_line(key, target), f"the permission for runs to use {key}")


def is_kept_destination(key: str, target: str) -> bool:
    """Whether this user gave this destination himself, once. A record that another user wrote does not count."""
    return _has(DESTINATIONS_FILE, _digest_line(key, target))


def _digest_line(key: str, target: str) -> bytes:
    """A digest, because a webhook's URL is a secret."""
    return hashlib.sha256(f"{key}={target}".encode()).hexdigest().encode() + b"\n"


def _line(run_toml: Path, limits: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(limits, sort_keys=True).encode()).hexdigest()
    return json.dumps({"path": str(run_toml.parent.resolve()), "limits": digest}).encode() + b"\n"


def shared_folder_warning(folder: Path) -> str | None:
    """Words for a runs folder in which every user of this machine may write; None for any other."""
    try:
        is_open = folder.stat().st_mode & 0o002
    except OSError:
        return None
    return (
        f"every user of this machine can write in {folder}: runs in it may not be yours; chmod o-w {folder}, or use "
        "another folder with --runs"
        if is_open
        else None
    )
