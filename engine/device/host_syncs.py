"""Finds host-device synchronisations by the operations that cause them: their result is read (`item()`) or their output
size depends on values (`nonzero`), so the host waits and the card then idles. They do not depend on the device, so they
can be counted on a CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

READ_BACK = frozenset(
    {
        aten._local_scalar_dense,  # item(), bool(), float(), int(), tolist() of a number
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten._unique,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.bincount,
    }
)
"""Operations that read values back to the host, on any device."""

INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
"""They call `nonzero` for each mask among their indices."""

COPIES = frozenset({aten._to_copy, aten.copy_})


class HostSyncs(TorchDispatchMode):
    """Lists the operations inside the block for which the host waits for the device, backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.found: list[str] = []
        """For each wait the operation's name and the line of Python that called it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args, kwargs or {}):
            self.found.append(f"{func.overloadpacket} at {_caller()}")
        return func(*args, **(kwargs or {}))


def host_syncs(action: Callable[[], object]) -> list[str]:
    """Run `action`; return the operations for which the host waits for the device, with where they were called.

    Copies to or from a CUDA card count unless asynchronous. Not seen: what a kernel launcher does inside one operation,
    and on a CPU `tolist()` of several numbers, which is a copy only on a card.
    """
    mode = HostSyncs()
    with mode:
        action()
    return mode.found


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    packet = func.overloadpacket
    if packet in READ_BACK:
        return True
    if packet is aten.repeat_interleave:
        return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if packet in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return packet in COPIES and _between_devices(func, args, kwargs)


def _between_devices(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a synchronous copy has the host on one side and a CUDA card on the other."""
    if func.overloadpacket is aten._to_copy:
        target, source, non_blocking = kwargs.get("device"), args[0], kwargs.get("non_blocking", False)
        target = args[0].device if target is None else torch.device(target)
    else:
        target, source = args[0].device, args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    asynchronous = non_blocking and (source.device.type != "cpu" or source.is_pinned())
    return {target.type, source.device.type} == {"cpu", "cuda"} and not asynchronous


def _caller() -> str:
    """`FILE:LINE` of the innermost Python call outside torch; "torch" if there is none."""
    frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename.replace("\\", "/")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "torch"
