"""A fixture for tests that count bytes of models in half precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.half_products import in_fp32


@pytest.fixture(scope="module")
def quick_half_products() -> Iterator[None]:
    """Compute products in half precision in fp32, because only their bytes count. Tests of many small products are
    slower with it."""
    with in_fp32():
        yield
