"""Stands in for flash-attn-4's module, which compiles its kernels for the card on first use. It is empty, because there
is no card."""
