"""Startup checks: kernels, allocator and optimizer are compared with a reference before a run relies on them."""
