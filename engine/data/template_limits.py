"""Limits of what a chat template may take: processor time, memory, and the size of numbers and of repeated text.

A template is a program by the model's author, which runs in Jinja's sandbox. The sandbox keeps it from files and from
other code, but not from endless loops or from 10 ** 10 ** 10.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

RENDER_CPU_SECONDS = 10.0
"""Processor time after which a rendering is stopped. A conversation of 1,000 turns takes a hundredth of a second."""

RENDER_BYTES = 512 << 20
"""Memory that a rendering may add to the process's address space."""

MOST_CHARACTERS = 32 << 20
"""Of the text that a rendering writes; the largest row of a file has half."""

MOST_BITS = 1 << 16
"""Of a number that a template multiplies. A larger product is one call in C, which no signal interrupts."""

MOST_ITEMS = 64 << 20
"""Characters of a text, or entries of a list, that a template repeats."""


class RenderTimeout(Exception):
    """A rendering took more than RENDER_CPU_SECONDS of processor time."""


@contextmanager
def render_limits() -> Iterator[None]:
    """Inside the block, raise RenderTimeout after RENDER_CPU_SECONDS of the process's processor time, and MemoryError
    for RENDER_BYTES more memory. There are no limits outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise_timeout)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space_bytes() + RENDER_BYTES
    lower = most if resource.RLIM_INFINITY in (soft, hard) and soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, previous)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise RenderTimeout


def _address_space_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)


def _product(left: Any, right: Any) -> Any:
    for text, count in ((left, right), (right, left)):
        if isinstance(text, Sized) and isinstance(count, int) and len(text) * count > MOST_ITEMS:
            raise OverflowError(f"{len(text)} items, {count} times")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
        raise OverflowError("a product of more digits than a template needs")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MOST_BITS:
        raise OverflowError("a power of more digits than a template needs")
    return left**right


# transformers makes the environment of chat templates itself, so the operators are set for all sandboxes of this
# process. Intercepted operators are not computed while a template is compiled either.
SandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
SandboxedEnvironment.default_binop_table |= {"*": _product, "**": _power}
