"""All values that the widgets of the Launch screen show, taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tui.files.catalog import FileEntry
from tui.launch.choice import Choice
from tui.launch.evaluate import EvaluatedChoice
from tui.launch.fields import FieldRow
from tui.launch.needs import Needs


@dataclass(frozen=True)
class LaunchSnapshot:
    """What the widgets show now."""

    choice: Choice
    evaluated: EvaluatedChoice
    last_valid: EvaluatedChoice
    """The newest evaluation with a run spec: its plan is shown, muted, while the present choice has none."""
    fields: Sequence[FieldRow]
    profiles: Sequence[FileEntry]
    recipes: Sequence[FileEntry]
    verdicts: Mapping[str, EvaluatedChoice]
    """Each recipe's evaluation on the chosen profile, by the recipe's argument; grows while the screen is idle."""
    needs: Needs
    """Disk and time."""
    basis: str
    """For which sequences the plan is; empty without a plan."""

    @property
    def profile_name(self) -> str:
        """The chosen profile's name."""
        return next((entry.path.stem for entry in self.profiles if entry.argument == self.choice.profile), "")
