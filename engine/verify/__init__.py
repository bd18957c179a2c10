"""Startup checks: a run compares each kernel, allocator and optimizer with a reference before it relies on it."""
