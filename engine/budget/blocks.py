"""The block size of CUDA's caching allocator, which the metered device and every prediction round up to."""

BLOCK_BYTES = 512
"""`kMinBlockSize` in `c10/cuda/CUDACachingAllocator.cpp` of torch."""


def round_to_blocks(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
