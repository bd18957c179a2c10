"""Typed keys in the order they were typed, for every field that takes text.

Textual hands a letter to the field at once, but a key that is a binding (backspace, ctrl+u, the arrows) goes up to the
application first, which runs it later. Where both come in one burst, as from a slow SSH line, the letters overtake:
"ctrl+u 4 0" leaves an empty field. So a field here runs its own bindings itself.

Try: `python -m pytest tests/tui/test_launch.py -k burst`
"""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.widget import Widget


class KeysInOrder:
    """Before the class of the field in its list of bases. No widget itself, or the field could not get the focus."""

    async def on_key(self: Widget, event: events.Key) -> None:  # type: ignore[misc]
        """Run the field's own binding of this key, if it has one."""
        action = next((own[event.key] for own in map(_bound, type(self).__mro__) if event.key in own), "")
        if action and await self.app.run_action(action, self):
            event.stop()
            event.prevent_default()


def _bound(kind: type) -> dict[str, str]:
    """Key = action of the bindings that a class itself declares."""
    found: dict[str, str] = {}
    if issubclass(kind, Widget) and kind is not Widget:
        for binding in kind.__dict__.get("BINDINGS", ()):
            if isinstance(binding, Binding):
                found |= dict.fromkeys(binding.key.split(","), binding.action)
    return found
