"""Installed releases of libraries that memory depends on, read once from package metadata, without importing them."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed(package: str) -> str:
    """Version of an installed package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def older(found: str, release: str) -> bool:
    """Whether the version `found` is older than `release` ("major.minor"); False if `found` is empty."""
    return bool(found) and _release(found) < _release(release)


def _release(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


DECODES_WITH_REPEATED_HEADS = older(installed("transformers"), "5.23")
"""Before 5.23, sdpa with a mask made copies of cached keys and values for all heads, also for a single new token."""
