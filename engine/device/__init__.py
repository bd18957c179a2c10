"""Devices, on which a run's tensors are allocated: how much memory they have, and how much is in use. `open_device` in
`open.py` turns a run spec into a `Device` (`base.py`), the protocol that the rest of the engine works with."""
