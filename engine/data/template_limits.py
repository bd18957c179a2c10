"""Limits of what a chat template may take: processor time, memory, and the size of numbers and of repeated text.

A template is a program by the model's author, which runs in Jinja's sandbox. The sandbox keeps it from files and from
other code, but not from endless loops or from 10 ** 10 ** 10. A single call in C, such as comparing lists that contain
each other many times, cannot be interrupted from inside: a template is rendered in a process that the kernel ends when
its time is over.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.killable import KillableProcess, ProcessEnded, bounded

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


IDLE_SECONDS = 5.0
"""After which the process that renders ends."""

REASON_LENGTH = 120
"""Characters of a template's error message that are shown."""

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What the Python code in a template's expressions and filters can raise. RecursionError is a RuntimeError."""

Rendering = tuple[str, list[tuple[int, int]]]
"""The text, and the ranges of characters that {% generation %} blocks produced."""


class RenderTimeout(Exception):
    """A rendering took more than RENDER_CPU_SECONDS of processor time."""


class RenderFailure(Exception):
    """The template raised an error; the text says which, as the rest of a sentence that begins with the template."""


def render(messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> Rendering:
    """Render a conversation as transformers does; `options` are the template, its variables and switches.

    Raises RenderTimeout, and RenderFailure for any error of the template. In a process of `renders_here` it never
    raises RenderTimeout: the kernel ends the process instead.
    """
    request = (list(messages), dict(options))
    answer = _render_here(request) if _place.is_killable else _render_elsewhere(request)
    if isinstance(answer, str):
        raise RenderFailure(answer)
    return answer


def renders_here() -> None:
    """Say that this process is one that may be ended: templates are then rendered in it, without a copy."""
    _place.is_killable = True


def _render_elsewhere(request: tuple[list[dict[str, Any]], dict[str, Any]]) -> Rendering | str:
    with _place.lock:
        try:
            answer: Rendering | str = _place.process.ask(request)
        except ProcessEnded as error:
            if error.signal == signal.SIGPROF:
                raise RenderTimeout from None
            return f"fails: its process {error}"
        except RecursionError:
            return "fails: RecursionError: the conversation is nested too deeply"
    return answer


def _render_here(request: tuple[list[dict[str, Any]], dict[str, Any]]) -> Rendering | str:
    """The rendering, or what failed."""
    messages, options = request
    try:
        with bounded(RENDER_CPU_SECONDS, RENDER_BYTES):
            result: Any = render_jinja_template([messages], **options)  # its annotation, str, is wrong in 5.23
    except jinja2.TemplateError as error:
        return f"rejects it: {_shortened(error)}"
    except TEMPLATE_ERRORS as error:
        if isinstance(error, MemoryError):
            _let_go(error)
        return f"fails: {type(error).__name__}: {_shortened(error)}"
    texts, spans = result
    if len(texts[0]) > MOST_CHARACTERS:
        return f"writes more than {MOST_CHARACTERS >> 20} Mi characters"
    return str(texts[0]), [(start, stop) for start, stop in spans[0]] if spans else []


class _Place:
    """Where templates are rendered."""

    def __init__(self) -> None:
        self.is_killable = False
        self.process = KillableProcess(_render_here, idle_seconds=IDLE_SECONDS)
        self.renew_lock()

    def renew_lock(self) -> None:
        """Another thread of the parent may have held the lock at the fork."""
        self.lock = threading.Lock()


_place = _Place()
os.register_at_fork(after_in_child=_place.renew_lock)


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:REASON_LENGTH]


def _let_go(error: BaseException) -> None:
    """Free what a stopped template has filled memory with: the variables of its frames, which refer to each other."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()


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
