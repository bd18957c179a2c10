"""flash-attn-4 compiles its kernels for the card on first use; there is no card."""
