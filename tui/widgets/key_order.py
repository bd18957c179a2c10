"""Typed keys in the order they were typed, also where many come in one burst, as from a slow SSH line.

Textual hands a letter to the field at once, but a key that is a binding (backspace, ctrl+u, the arrows) goes up to the
application first, which runs it later. In a burst the letters overtake: "ctrl+u 4 0" leaves an empty field. So a field
here runs its own bindings itself. And a key is handed to whatever had the focus when it came, though a key before it,
not obeyed yet, moves the focus: "tab j" moves the cursor of the list that was left. So the application takes one key
at a time.

Try: `python -m pytest tests/tui/screens/test_launch.py -k burst`
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

from textual import events
from textual.app import App
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import Input, TextArea

KEY_SECONDS = 0.25
"""Longer than any field takes for a letter."""

HOPS = 16
"""Turns of the event loop that a message takes to the screen and back, and then some."""


class KeysInOrder:
    """Before the class of the field in its list of bases. No widget itself, or the field could not get the focus."""

    async def on_key(self: Widget, event: events.Key) -> None:  # type: ignore[misc]
        """Run the field's own binding of this key, if it has one."""
        action = next((own[event.key] for own in map(_bound, type(self).__mro__) if event.key in own), "")
        if action and await self.app.run_action(action, self):
            event.stop()
            event.prevent_default()


class OneKeyAtATime(App[None]):
    """An application that takes the next key when the one before has done what it does. The focus must be moved by
    `Screen.set_focus`: `Widget.focus` only asks for it, behind the keys that have come already."""

    async def on_event(self, event: events.Event) -> None:
        """Bindings are run as their keys come, while what has the focus takes no text; a field is waited for."""
        typed = isinstance(event, events.Key) and not event.is_forwarded
        focused = self.focused if typed and self.screen_stack else None
        if focused is None:
            await super().on_event(event)
        elif isinstance(focused, Input | TextArea):
            await super().on_event(event)
            await _caught_up(focused)
        # Esc is no binding everywhere.
        elif (key := cast(events.Key, event).key) != "escape" and await self._obeyed(key):
            self.app_focus = True
        else:
            await super().on_event(event)
        if typed:
            await _settled()

    async def _obeyed(self, key: str) -> bool:
        return await self._check_bindings(key, priority=True) or await self._check_bindings(key)


async def _caught_up(field: Widget) -> None:
    """The field has taken what was handed to it. Not waited for in earnest: it might wait for us."""
    done = asyncio.Event()
    field.call_later(done.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), KEY_SECONDS)


async def _settled() -> None:
    """What an action has told other widgets is theirs to do before the next key."""
    for _ in range(HOPS):
        await asyncio.sleep(0)


def _bound(kind: type) -> dict[str, str]:
    """Key = action of the bindings that a class itself declares."""
    found: dict[str, str] = {}
    if issubclass(kind, Widget) and kind is not Widget:
        for binding in kind.__dict__.get("BINDINGS", ()):
            if isinstance(binding, Binding):
                found |= dict.fromkeys(binding.key.split(","), binding.action)
    return found
