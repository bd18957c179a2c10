"""How many tokens' logits a chunked loss holds at once."""

from __future__ import annotations

import pytest

from engine.budget.trace.memory_config import CHUNK_CAPACITY_SHARE, FULL_CHUNK_TOKENS, chunk_tokens

GIB = 2**30


@pytest.mark.parametrize(
    ("vocabulary", "capacity_gib", "tokens"),
    [
        (151_936, 80, 512),
        (151_936, 24, 512),
        (151_936, 8, 220),
        (151_936, 1, 110),
        (128_256, 24, 512),
        (262_144, 24, 384),
        (32_000, 80, 524),
        (264, 0.0625, 63_550),
    ],
)
def test_a_large_vocabulary_gets_whole_chunks_where_there_is_room(
    vocabulary: int, capacity_gib: float, tokens: int
) -> None:
    assert chunk_tokens(vocabulary, int(capacity_gib * GIB)) == tokens


def test_a_chunk_takes_a_small_part_of_the_device() -> None:
    for vocabulary in (50_000, 152_000, 262_144):
        for capacity_gib in (8, 16, 24, 48, 80):
            tokens = chunk_tokens(vocabulary, capacity_gib * GIB)
            assert tokens <= FULL_CHUNK_TOKENS
            assert 4 * vocabulary * tokens <= max(capacity_gib * GIB // CHUNK_CAPACITY_SHARE, 64 * 2**20)
