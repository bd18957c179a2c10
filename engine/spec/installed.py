"""Versions of installed packages, read once from their metadata; no package is imported."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution


@cache
def installed(package: str) -> str:
    """Version of an installed package; empty where it is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    # Its property `version` parses all of the metadata, the package's whole description included.
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    return metadata.partition("\nVersion: ")[2].partition("\n")[0].strip()


def older(found: str, release: str) -> bool:
    """Whether the version `found` is older than `release` ("major.minor"); False if `found` is empty."""
    return bool(found) and _release(found) < _release(release)


def _release(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
