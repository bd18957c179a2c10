"""Where the metered device looks: every place in which torch makes, grows or swaps a storage on the host.

- A dispatch mode sees every operation of the threads it is pushed on, backward and recomputation included. Views and
  in-place operations cannot allocate and are waved through; whatever returns fresh tensors is counted; `out=`,
  `resize_` and `set_` are measured before and after. An operation over the limit has run by then, but its result is
  dropped (or its target restored) before anyone sees it.
- `UntypedStorage.resize_` does not pass the dispatcher: FSDP2 frees and refills its buffers with it. It is replaced
  while a meter is active, and refuses before growing.
- Modes are per thread: threads started while a meter is active get one of their own (`Thread.start` is wrapped) and
  begin in the region their parent was in. A thread that was already running is blind until it enters `activate()`.
- A forked worker inherits the mode and must not use it: its memory is host memory, its books a copy.

Not seen: workspace inside an operation, and memory that torch is handed ready-made without an operation (`frombuffer`,
memory-mapped safetensors): that is what `adopt` is for. Seen too large: under any dispatch mode autograd adds up the
gradients that meet at a fork out of place, so that one more of them is alive for a moment than without a meter.

Try: `pytest tests/device/test_meter.py`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from engine.device.co_tenant import SharedCount
from engine.device.ledger import Ledger
from engine.device.operations import (
    ANNOUNCERS,
    DECOMPOSE,
    NOTHING,
    ONE,
    RESIZES,
    behaviour,
    behaviours,
    written_tensors,
)

COUNTING, HOST, OFF = 0, 1, 2
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_c_resize = torch.UntypedStorage.resize_


class _Watch(TorchDispatchMode):
    """The dispatch mode of one thread. `state` says whether it counts, is in a host region, or is switched off."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below in a dynamo guard, which costs more than the counting.
        return False

    def __init__(self, ledger: Ledger, state: int = COUNTING) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.ledger = ledger
        self.live = ledger.live
        self.state = state
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not _PLAIN.issuperset(types):
            if not any(issubclass(kind, FakeTensor) for kind in types):
                return NotImplemented  # a wrapper such as DTensor unpacks first; its inner operations come back here
            if not self.ledger.counts_fakes or func.namespace == "prim":
                return func(*args, **(kwargs or {}))  # shapes without memory; questions such as `tensor.device`
            if self.ledger.sums_in_place and _sums_gradients(func, args):
                result = func(*args, **(kwargs or {}))
                old, new = args[0].untyped_storage(), result.untyped_storage()
                self.ledger.take_over(old, new, func, result.shape)
                return result
        does = behaviours.get(id(func))
        if does is None:
            does = behaviour(func)
        if does is NOTHING or self.state == OFF:
            return func(*args, **kwargs) if kwargs else func(*args)
        if does is ONE:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if result is not None:
                storage = result.untyped_storage()
                if storage._cdata not in self.live:
                    self.meet(storage, func, result)
            return result
        if does is DECOMPOSE:
            # Inference mode hands composite operations over whole; taken apart, their intermediates are seen too.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if does is RESIZES:
            return self.measured(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.meet_all(func, result)
        return result

    def meet(self, storage: torch.UntypedStorage, func: Any, tensor: torch.Tensor) -> None:
        """A storage that is not counted turned up in `tensor`, the result of `func`."""
        ledger = self.ledger
        kinds = ("meta", "cpu") if ledger.counts_fakes else ("cpu",)  # beside fakes stand whole numbers that are real
        if storage._cdata in ledger.host or storage.device.type not in kinds:
            return
        if self.state == HOST:
            ledger.add_host(storage, asked_for=storage.nbytes() > 0 and func._schema.name not in ANNOUNCERS)
        elif size_bytes := storage.nbytes():
            ledger.add(storage, size_bytes, func, tensor.shape, tensor.dtype)

    def meet_all(self, func: Any, result: Any) -> None:
        """Count every tensor in a result of nested lists, tuples and dicts."""
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.live:
                self.meet(storage, func, result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.meet_all(func, item)
        elif isinstance(result, dict):
            for item in result.values():
                self.meet_all(func, item)

    def measured(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that may resize or swap the storage of a tensor it writes to; undo that when refused."""
        before = [_Shape(tensor) for tensor in written_tensors(func, args, kwargs)]
        result = func(*args, **kwargs)
        try:
            for shape in before:
                self.reread(func, shape.tensor)
            self.meet_all(func, result)
        except torch.OutOfMemoryError:
            for shape in before:
                shape.restore()
            raise
        return result

    def reread(self, func: Any, tensor: torch.Tensor) -> None:
        """Compare a written tensor's storage with the books."""
        storage = tensor.untyped_storage()
        entry = self.live.get(storage._cdata)
        if entry is None:
            self.meet(storage, func, tensor)
        else:
            self.ledger.resize(entry, storage.nbytes(), func)


def _sums_gradients(func: Any, args: Any) -> bool:
    """Whether autograd is adding up two gradients of one tensor: between its nodes, outside of any recording."""
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or torch._C._current_autograd_node():
        return False
    left, right = args[0], args[1]
    return isinstance(right, torch.Tensor) and left.shape == right.shape and left.dtype == right.dtype


class _Shape:
    """A tensor's storage and geometry before an operation that may change them."""

    __slots__ = ("offset", "size", "size_bytes", "storage", "stride", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.size_bytes = self.storage.nbytes()
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.shape, tensor.stride()

    def restore(self) -> None:
        """Put storage, geometry and size back. Values an operation already wrote stay written."""
        if self.storage.nbytes() > self.size_bytes:
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)
            _c_resize(self.storage, self.size_bytes)
        elif self.tensor.untyped_storage()._cdata != self.storage._cdata:
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)


class Meter:
    """One set of books and everything that feeds it while it is active."""

    def __init__(self, capacity_bytes: int, neighbour: SharedCount | None = None) -> None:
        self.ledger = Ledger(capacity_bytes, neighbour)
        self._watches: weakref.WeakSet[_Watch] = weakref.WeakSet()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._active = 0
        self._undo: Callable[[], None] = lambda: None
        _meters.add(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count in this thread, and in threads started meanwhile. Re-entering in the same thread changes nothing."""
        watch = self._own_watch()
        with self._lock:
            self._active += 1
            if self._active == 1:
                self._undo = self._install()
        watch.depth += 1
        try:
            if watch.depth == 1:
                with watch:
                    yield
            else:
                yield
        finally:
            watch.depth -= 1
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._undo()
                    for straggler in self._watches:
                        if straggler is not watch:
                            straggler.state = OFF

    @contextmanager
    def host_region(self) -> Iterator[None]:
        """Storages made by this thread inside are host memory, for good."""
        watch = self._current_watch() or self._own_watch()
        before = watch.state
        if before == COUNTING:
            watch.state = HOST
        try:
            yield
        finally:
            watch.state = before

    @contextmanager
    def counted_region(self) -> Iterator[None]:
        """Count inside, also within a host region (`upload`)."""
        watch = self._current_watch() or self._own_watch()
        before = watch.state
        if before == HOST:
            watch.state = COUNTING
        try:
            yield
        finally:
            watch.state = before

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that are not counted yet. Raises torch.OutOfMemoryError."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ledger.live and storage.nbytes():
                self.ledger.add(storage, storage.nbytes(), "adopt", tensor.shape, tensor.dtype)
                self.ledger.forget_host(storage)

    def _own_watch(self) -> _Watch:
        watch = getattr(self._local, "watch", None)
        if watch is None:
            watch = self._local.watch = _Watch(self.ledger)
            self._watches.add(watch)
        return watch

    def _current_watch(self) -> _Watch | None:
        """The watch in force here: autograd's workers run under the one of the thread that called backward."""
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _Watch) and mode.ledger is self.ledger:
                return mode
        return None

    def _install(self) -> Callable[[], None]:
        """Replace `UntypedStorage.resize_` and `Thread.start`; returns what puts the former ones back."""
        former_resize, former_start = torch.UntypedStorage.resize_, threading.Thread.start

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            return self._resize(former_resize, storage, size)

        def start(thread: threading.Thread) -> None:
            self._follow(thread)
            former_start(thread)

        def undo() -> None:
            torch.UntypedStorage.resize_ = former_resize  # type: ignore[method-assign]
            threading.Thread.start = former_start  # type: ignore[method-assign]

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        return undo

    def _resize(self, former: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        watch, ledger = self._current_watch(), self.ledger
        entry = ledger.live.get(storage._cdata)
        if entry is None:
            state = OFF if not self._active else watch.state if watch else COUNTING
            if state == HOST and storage._cdata not in ledger.host:
                ledger.add_host(storage)
            elif state == COUNTING and size and storage._cdata not in ledger.host and storage.device.type == "cpu":
                ledger.add(storage, size, "UntypedStorage.resize_", (size,), torch.uint8)
            return former(storage, size)
        counted = entry.size_bytes
        ledger.resize(entry, size, "UntypedStorage.resize_")
        try:
            return former(storage, size)
        except BaseException:  # whatever stopped it: the books go back to what is held
            ledger.correct(entry, counted)
            raise

    def _follow(self, thread: threading.Thread) -> None:
        """Make `thread` count from its first line, in the region the starting thread is in."""
        parent = self._current_watch()
        if parent is None or parent.state == OFF:
            return
        state, run = parent.state, thread.run

        def counted_run() -> None:
            del thread.run  # the instance attribute, which would keep the thread alive in a cycle
            watch = self._own_watch()
            watch.state, watch.depth = state, 1
            with watch:
                run()

        thread.run = counted_run  # type: ignore[method-assign]

    def switch_off(self) -> None:
        """Never count again (in a forked child)."""
        self._active = 0
        for watch in self._watches:
            watch.state = OFF


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _forked() -> None:
    for meter in _meters:
        meter.switch_off()


os.register_at_fork(after_in_child=_forked)
