"""The foot of the Launch screen: verdict, a bar for each device, legend, and one line on what stands in the way.

Pure functions from what a choice came to, to lines for a width and a height.
"""

from __future__ import annotations

from textual.content import Content

from engine.spec.files.text import visible
from tui.launch.budget_bar import bar_line, legend_lines, verdict_line
from tui.launch.choice import Outcome, split_of
from tui.launch.fields import as_typed
from tui.theme import draw


def budget_lines(
    outcome: Outcome, sound: Outcome, width: int, height: int, *, letters: bool, ascii_only: bool
) -> list[Content]:
    """As many lines as the height; `sound` is what is shown, muted, while the present outcome has no plan."""
    state = state_line(outcome, ascii_only=ascii_only)
    plan = sound.plan
    if plan is None:
        return [Content.styled("no plan", "$muted"), *[Content("")] * (height - 2), state]
    labels = _labels(sound, max(1, height - 4))
    lines = [verdict_line(plan, width, ascii_only=ascii_only)]
    lines += [bar_line(label, plan, width, letters=letters, ascii_only=ascii_only) for label in labels]
    lines += legend_lines(plan, width, max(1, height - len(lines) - 1))
    if outcome.plan is None:
        lines = [Content.styled(line.plain, "$muted") for line in lines]
    return [*lines, *[Content("")] * (height - len(lines) - 1), state]


def devices_of(outcome: Outcome) -> int:
    """How many devices would each get a bar."""
    return outcome.spec.profile.device.count if outcome.spec is not None else 1


def _labels(sound: Outcome, room: int) -> list[str]:
    """A bar for each device, or one for all where there is no room."""
    spec = sound.spec
    if spec is None or spec.profile.device.kind == "metered":
        return ["simulated"]
    if spec.profile.device.kind == "cpu":
        return ["host"]
    count = spec.profile.device.count
    indices = spec.limits.devices or list(range(count))
    return [f"GPU {index}" for index in indices] if count <= room else [f"each of {count}"]


def state_line(outcome: Outcome, *, ascii_only: bool) -> Content:
    """What keeps the run from starting, else what should be known, else how the batch is cut."""
    plan = outcome.plan
    if outcome.troubles:
        more = f" (and {len(outcome.troubles) - 1} more)" if len(outcome.troubles) > 1 else ""
        glyph = draw("✗", ascii_only=ascii_only)
        return Content.styled(f"{glyph} cannot start{more}: {visible(outcome.troubles[0].sentence)}", "$bad")
    if outcome.unplanned:
        text = f"? no plan: {visible(outcome.unplanned)}; what fits is learned in the run"
        return Content.styled(text, "$caution")
    if outcome.notices:
        return Content.styled(visible(outcome.notices[0]), "$caution")
    if plan is not None and plan.remedies:
        remedies = ", ".join(f"{key} = {as_typed(value)}" for key, value in plan.remedies.items())
        return Content.styled(f"fits with {remedies}; what is learned stays the same", "$caution")
    if outcome.spec is not None and plan is not None:
        return Content.styled(draw(split_of(outcome.spec, plan).sentence, ascii_only=ascii_only), "$muted")
    return Content("")
