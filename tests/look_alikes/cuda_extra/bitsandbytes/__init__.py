"""Stands in for bitsandbytes where it is not installed: 4-bit NormalFloat weights, computed with torch's operations.

It has what transformers and peft ask of bitsandbytes 0.50 for `load_in_4bit`, and stores what that stores: two weights
a byte, with the largest absolute value of every 64 (Dettmers et al. 2023, section 3).
"""

from . import functional, nn

__version__ = "0.50.2"
supported_torch_devices = {"cpu", "cuda"}
__all__ = ["functional", "nn", "supported_torch_devices"]
