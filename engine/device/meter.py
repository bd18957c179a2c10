"""Observes allocations for the metered device, wherever torch creates, resizes or replaces a storage on the host.

A dispatch mode intercepts every operation of its thread, backward and recomputation included. One that exceeds the
limit has already run: its result is dropped, or the tensor it wrote to restored, before the caller sees it. FSDP2 frees
and refills buffers by `UntypedStorage.resize_`, past the dispatcher; the patch refuses before the storage grows. A
thread that runs before the meter does is observed once it enters `active()`. A forked worker inherits the mode but must
not count: its memory is host memory, its tracker a copy.

Not observed: workspace inside an operation, and memory that torch receives without one (`frombuffer`, memory-mapped
safetensors), which `adopt` counts. Peaks in backward may be too high: under any dispatch mode autograd sums gradients
of one tensor out of place, which briefly allocates one more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from engine.device.allocation_tracker import AllocationTracker
from engine.device.co_tenant import SharedByteCount

NOTHING = "does not allocate memory that outlives it"
ONE = "returns one tensor"
MANY = "returns several values"
RESIZES = "may resize or swap the storage of a tensor it writes to"
DECOMPOSE = "consists of other operations"

behaviours: dict[int, str] = {}
"""Keyed by `id` of the overload, as hashing one runs Python code; `_kept_alive` holds them so that no id is reused."""
_kept_alive: list[Any] = []

_SWAPPERS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"}
# By their schema they return views, but the storage is new: torch.tensor() and from_numpy() call them.
_FRESH_DESPITE_SCHEMA = {"aten::lift_fresh", "aten::lift"}
WRAPPERS_OF_EXISTING_MEMORY = {*_FRESH_DESPITE_SCHEMA, "aten::set_"}
"""Operations that return a tensor over memory which was allocated before, outside of torch's operations."""


def behaviour(func: Any) -> str:
    """NOTHING, ONE (one new tensor), MANY (several values), RESIZES (may change the storage of a tensor it writes to)
    or DECOMPOSE (made of other operations)."""
    does = behaviours[id(func)] = _read(func)
    _kept_alive.append(func)
    return does


def _read(func: Any) -> str:
    schema = func._schema
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU"):
        return DECOMPOSE
    native = func.namespace == "aten"
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if schema.name in _SWAPPERS or any(argument.is_out for argument in writes) or (writes and not native):
        return RESIZES
    aliases = all(value.alias_info is not None for value in schema.returns)
    if native and aliases and schema.name not in _FRESH_DESPITE_SCHEMA:
        return NOTHING
    if len(schema.returns) == 1 and str(schema.returns[0].type) in ("Tensor", "Optional[Tensor]"):
        return ONE
    return MANY


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            candidates = value if isinstance(value, (list, tuple)) else (value,)
            yield from (item for item in candidates if isinstance(item, torch.Tensor))


COUNTING, HOST, OFF = 0, 1, 2
_PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_c_resize = torch.UntypedStorage.resize_


class _CountingMode(TorchDispatchMode):
    """Counts the allocations of one thread. `state` is COUNTING, HOST (in a host region) or OFF."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this override, torch wraps __torch_dispatch__ in a dynamo guard that costs more than the counting.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this override, torch refuses to compile while the mode is active.
        return True

    def __init__(self, tracker: AllocationTracker, state: int = COUNTING) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.tracker = tracker
        self.live = tracker.live
        self.state = state
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not _PLAIN.issuperset(types):
            if all(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for kind in types):
                _PLAIN.update(types)  # a subclass that leaves operations alone, such as bitsandbytes' parameters
                return self.__torch_dispatch__(func, types, args, kwargs)
            if not any(issubclass(kind, FakeTensor) for kind in types):
                return NotImplemented  # a wrapper such as DTensor unpacks first; its inner operations come back here
            if not self.tracker.counts_fake_tensors or func.namespace == "prim":
                return func(*args, **(kwargs or {}))  # `prim`: attribute look-ups such as `tensor.device`
            if self.tracker.sums_gradients_in_place and _sums_gradients(func, args):
                result = func(*args, **(kwargs or {}))
                old, new = args[0].untyped_storage(), result.untyped_storage()
                self.tracker.transfer(old, new, func, result.shape)
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
                    self.count_new(storage, func, result)
            return result
        if does is DECOMPOSE:
            # In inference mode composite operations arrive whole; decomposed, their intermediates are counted too.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if does is RESIZES:
            return self.run_resizing(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.count_result(func, result)
        return result

    def count_new(self, storage: torch.UntypedStorage, func: Any, tensor: torch.Tensor) -> None:
        """Count `storage` unless it is host memory or elsewhere. Raises torch.OutOfMemoryError above the cap."""
        tracker = self.tracker
        kinds = ("meta", "cpu") if tracker.counts_fake_tensors else ("cpu",)  # a simulation also has a few real tensors
        if storage._cdata in tracker.host or storage.device.type not in kinds:
            return
        if self.state == HOST:
            wraps = func._schema.name in WRAPPERS_OF_EXISTING_MEMORY
            tracker.add_host(storage, is_new=storage.nbytes() > 0 and not wraps)
        elif size_bytes := storage.nbytes():
            tracker.add(storage, size_bytes, func, tensor.shape, tensor.dtype)

    def count_result(self, func: Any, result: Any) -> None:
        """Count every new tensor in `result`, which may be nested lists, tuples and dicts."""
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.live:
                self.count_new(storage, func, result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.count_result(func, item)
        elif isinstance(result, dict):
            for item in result.values():
                self.count_result(func, item)

    def run_resizing(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that may resize; if refused, restore the tensor and raise torch.OutOfMemoryError."""
        states = [_StorageState(tensor) for tensor in written_tensors(func, args, kwargs)]
        result = func(*args, **kwargs)
        try:
            for state in states:
                self.recount(func, state.tensor)
            self.count_result(func, result)
        except torch.OutOfMemoryError:
            for state in states:
                state.restore()
            raise
        return result

    def recount(self, func: Any, tensor: torch.Tensor) -> None:
        """Update the size counted for the storage of `tensor`. Raises torch.OutOfMemoryError if it is refused."""
        storage = tensor.untyped_storage()
        entry = self.live.get(storage._cdata)
        if entry is None:
            self.count_new(storage, func, tensor)
        else:
            self.tracker.resize(entry, storage.nbytes(), func)


def _sums_gradients(func: Any, args: Any) -> bool:
    """Whether autograd sums two gradients of one tensor by this addition, outside any graph node."""
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or torch._C._current_autograd_node():
        return False
    left, right = args[0], args[1]
    return isinstance(right, torch.Tensor) and left.shape == right.shape and left.dtype == right.dtype


class _StorageState:
    """A tensor's storage, size and strides before an operation that may change them."""

    __slots__ = ("offset", "size", "size_bytes", "storage", "stride", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.size_bytes = self.storage.nbytes()
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.shape, tensor.stride()

    def restore(self) -> None:
        """Values that the operation wrote are not undone."""
        if self.storage.nbytes() > self.size_bytes:
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)
            _c_resize(self.storage, self.size_bytes)
        elif self.tensor.untyped_storage()._cdata != self.storage._cdata:
            self.tensor.set_(self.storage, self.offset, self.size, self.stride)


class Meter:
    """Observes allocations inside `active()` and counts them in its `AllocationTracker`."""

    def __init__(self, capacity_bytes: int, co_tenant: SharedByteCount | None = None) -> None:
        self.tracker = AllocationTracker(capacity_bytes, co_tenant)
        self._modes: weakref.WeakSet[_CountingMode] = weakref.WeakSet()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._active = 0
        self._undo: Callable[[], None] = lambda: None
        _meters.add(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count allocations of this thread and of threads started inside the block. May be nested."""
        mode = self._thread_mode()
        with self._lock:
            self._active += 1
            if self._active == 1:
                self._undo = self._install()
        mode.depth += 1
        try:
            if mode.depth == 1:
                with mode:
                    yield
            else:
                yield
        finally:
            mode.depth -= 1
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._undo()
                    for other in self._modes:  # threads that are still running
                        if other is not mode:
                            other.state = OFF

    def host_region(self) -> AbstractContextManager[None]:
        """Storages that this thread creates inside the block are host memory, which is never counted."""
        return self._in_state(HOST, instead_of=COUNTING)

    def counted_region(self) -> AbstractContextManager[None]:
        """Allocations inside the block are counted, even within a host region; `upload` uses this."""
        return self._in_state(COUNTING, instead_of=HOST)

    @contextmanager
    def _in_state(self, state: int, *, instead_of: int) -> Iterator[None]:
        mode = self._active_mode() or self._thread_mode()
        before = mode.state
        if before == instead_of:
            mode.state = state
        try:
            yield
        finally:
            mode.state = before

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises torch.OutOfMemoryError if refused."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.tracker.live and storage.nbytes():
                self.tracker.add(storage, storage.nbytes(), "adopt", tensor.shape, tensor.dtype)
                self.tracker.forget_host(storage)

    def _thread_mode(self) -> _CountingMode:
        mode = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._local.mode = _CountingMode(self.tracker)
            self._modes.add(mode)
        return mode

    def _active_mode(self) -> _CountingMode | None:
        """This meter's mode in the thread; in autograd's worker threads, that of the thread that called backward."""
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _CountingMode) and mode.tracker is self.tracker:
                return mode
        return None

    def _install(self) -> Callable[[], None]:
        """Patch `UntypedStorage.resize_` and `Thread.start`; returns the function that restores them."""
        former_resize, former_start = torch.UntypedStorage.resize_, threading.Thread.start

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            return self._resize(former_resize, storage, size)

        def start(thread: threading.Thread) -> None:
            self._count_in(thread)
            former_start(thread)

        def undo() -> None:
            _patch(torch.UntypedStorage, "resize_", former_resize)
            _patch(threading.Thread, "start", former_start)

        _patch(torch.UntypedStorage, "resize_", resize_)
        _patch(threading.Thread, "start", start)
        return undo

    def _resize(self, former: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        mode, tracker = self._active_mode(), self.tracker
        entry = tracker.live.get(storage._cdata)
        if entry is None:
            state = OFF if not self._active else mode.state if mode else COUNTING
            if state == HOST and storage._cdata not in tracker.host:
                tracker.add_host(storage)
            elif state == COUNTING and size and storage._cdata not in tracker.host and storage.device.type == "cpu":
                tracker.add(storage, size, "UntypedStorage.resize_", (size,), torch.uint8)
            return former(storage, size)
        counted = entry.size_bytes
        tracker.resize(entry, size, "UntypedStorage.resize_")
        try:
            return former(storage, size)
        except BaseException:  # whatever the error, the storage kept its size
            tracker.undo_resize(entry, counted)
            raise

    def _count_in(self, thread: threading.Thread) -> None:
        """Make `thread` count from its first line on, in the same state as the thread that starts it."""
        parent = self._active_mode()
        if parent is None or parent.state == OFF:
            return
        state, run = parent.state, thread.run

        def counted_run() -> None:
            del thread.run  # this attribute of the instance makes a reference cycle
            mode = self._thread_mode()
            mode.state, mode.depth = state, 1
            with mode:
                run()

        _patch(thread, "run", counted_run)

    def switch_off(self) -> None:
        """Stop counting for the rest of this process; called in a forked child process."""
        self._active = 0
        for mode in self._modes:
            mode.state = OFF


def _patch(owner: object, name: str, replacement: Callable[..., Any]) -> None:
    setattr(owner, name, replacement)


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _stop_counting_after_fork() -> None:
    for meter in _meters:
        meter.switch_off()


os.register_at_fork(after_in_child=_stop_counting_after_fork)
