"""Handle keys in the order in which they were typed, also when many arrive at once, as over a slow SSH connection.

Textual hands a letter to the input field at once, but a key with a binding (backspace, ctrl+u, the arrows) goes to the
application first, which runs it later. When many keys arrive at once, letters overtake such keys: "ctrl+u 4 0" leaves
an empty field. So `OrderedKeys` makes a field run its own bindings. Textual also hands a key to the widget that has the
focus when the key arrives, although an earlier key that is not handled yet may move the focus: "tab j" moves the cursor
of the list that Tab leaves. So `SequentialKeysApp` handles one key at a time.

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
from textual.widgets import Input

KEY_SECONDS = 0.25
"""Longest time to wait for a field to handle a letter."""

EVENT_LOOP_TURNS = 16
"""More turns of the event loop than a message takes from a widget to the screen and back."""


class OrderedKeys:
    """A mixin that makes an input field run its own key bindings at once, in the order in which keys were typed.

    List it before Textual's class among the bases. It is not a Widget itself, because a field with two Widget bases
    could not get the focus.
    """

    async def on_key(self: Widget, event: events.Key) -> None:  # type: ignore[misc]  # a mixin for widgets, no widget
        """If the field's class itself binds this key, run the bound action immediately."""
        action = next((own[event.key] for own in map(_bound, type(self).__mro__) if event.key in own), "")
        if action and await self.app.run_action(action, self):
            event.stop()
            event.prevent_default()


class SequentialKeysApp(App[None]):
    """An application that handles a key only after all effects of the previous key. Code must move the focus with
    `Screen.set_focus`, because `Widget.focus` only queues a request, behind the keys that have arrived already."""

    async def on_event(self, event: events.Event) -> None:
        """Run the binding of a key immediately. If an input field has the focus, pass the key to the field instead and
        wait until the field has handled it."""
        typed = isinstance(event, events.Key) and not event.is_forwarded
        focused = self.focused if typed and self.screen_stack else None
        if focused is None:
            await super().on_event(event)
        elif isinstance(focused, Input | OrderedKeys):
            await super().on_event(event)
            await _field_is_idle(cast(Widget, focused))
        # Esc is left to Textual: not every screen binds it.
        elif (key := cast(events.Key, event).key) != "escape" and await self._run_binding(key):
            self.app_focus = True
        else:
            await super().on_event(event)
        if typed:
            await _messages_handled()

    async def _run_binding(self, key: str) -> bool:
        return await self._check_bindings(key, priority=True) or await self._check_bindings(key)


async def _field_is_idle(field: Widget) -> None:
    """Wait until the field has handled its events, at most KEY_SECONDS: the field may itself be waiting for the
    application."""
    done = asyncio.Event()
    field.call_later(done.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), KEY_SECONDS)


async def _messages_handled() -> None:
    """Wait until other widgets have handled the messages of an action, before the next key is handled."""
    for _ in range(EVENT_LOOP_TURNS):
        await asyncio.sleep(0)


def _bound(kind: type) -> dict[str, str]:
    """The keys that a widget class binds itself (not its base classes), with the action of each."""
    found: dict[str, str] = {}
    if issubclass(kind, Widget) and kind is not Widget:
        for binding in kind.__dict__.get("BINDINGS", ()):
            if isinstance(binding, Binding):
                found |= dict.fromkeys(binding.key.split(","), binding.action)
    return found
