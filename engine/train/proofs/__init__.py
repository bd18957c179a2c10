"""Proofs at start: before a run trusts a kernel, an allocator or an optimizer, it compares it with a reference."""
