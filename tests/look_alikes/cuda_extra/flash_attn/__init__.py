"""Stands in for flash-attn-4, which brings the module `flash_attn.cute` and nothing else of flash-attn."""
