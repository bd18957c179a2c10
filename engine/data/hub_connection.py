"""Asks the hub once whether it answers, because without a network the libraries' retries take half a minute.

Try: `HF_ENDPOINT=http://127.0.0.1:9 tunedeck data -r RECIPE`, with a recipe whose data are on the hub
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by version

ANSWER_SECONDS = 10.0
"""How long the hub may take for its answer."""


def ask_hub() -> None:
    """Send one request to the hub. Raises huggingface_hub.errors.HTTPError if no answer comes within 10 s."""
    get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """While the block runs, if the hub does not answer, let the libraries use only what is in their caches."""
    if constants.HF_HUB_OFFLINE or _answers():
        yield
        return
    import datasets  # imported here: it takes a second, which others who only ask the hub need not wait for

    earlier = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = earlier


def _answers() -> bool:
    try:
        ask_hub()
    except HTTPError:
        return False
    return True
