"""A metered device that is in use during a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.device.metered import MeteredDevice


@pytest.fixture
def device() -> Iterator[MeteredDevice]:
    """A metered device of 1 GiB, active in the test's thread."""
    large = MeteredDevice(2**30)
    with large.activate():
        yield large
