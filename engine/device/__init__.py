"""Devices: CUDA, CPU and the metered device, their memory and their out-of-memory errors.

`open_device` in `open.py` turns a run spec into a `Device` (`base.py`), the protocol that the rest of the engine works
with.
"""
