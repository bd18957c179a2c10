"""The block size of CUDA's caching allocator, which the metered device and every prediction round up to."""

BLOCK_BYTES = 512


def whole_blocks(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
