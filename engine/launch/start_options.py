"""The options of a start: what a command line, or the console, says beside the keys of profile and recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads this file before it shows its help, which pydantic would delay
    from engine.config.schema.run import Limits

QUEUED_WAIT_SECONDS = 24 * 3600.0
"""How long a queued run waits for a busy device, unless --wait says otherwise."""


@dataclass(frozen=True)
class StartOptions:
    """The options that `train`, `resume`, `queue add` and `launch` share; each takes some of them. The texts that
    --help shows are in `engine.commands.shared`."""

    profile: str | None = None
    recipe: str | None = None
    overrides: Sequence[str] | None = None
    """KEY=VALUE, of --set."""
    name: str | None = None
    devices: str | None = None
    """Indices such as "2,3"."""
    wait: float | None = None
    """Seconds."""
    detach: bool = False
    force: bool = False
    as_json: bool = False
    run_spec: Path | None = None
    trust_remote_code: bool = False
    max_hours: float | None = None
    on_finish: str | None = None
    runs: Path | None = None

    def limits(self) -> Limits:
        """The [limits] table of a new run. They are stored with the run and apply again when it is resumed. Raises
        UsageError for bad device indices."""
        from engine.config.check.hardware_rules import parse_device_indices
        from engine.config.schema.run import Limits

        return Limits(**{**self.changed_limits(), "devices": parse_device_indices(self.devices)})

    def changed_limits(self) -> dict[str, Any]:
        """The keys of [limits] that this command line sets; all others of a resumed run stay as they were, and 0 or ""
        removes one. Raises UsageError for bad device indices."""
        from engine.config.check.hardware_rules import parse_device_indices

        given = {
            "devices": None if self.devices is None else parse_device_indices(self.devices or None),
            "wait_seconds": self.wait,
            "max_hours": self.max_hours,
            "on_finish": self.on_finish,
            "trust_remote_code": self.trust_remote_code or None,
        }
        return {name: value for name, value in given.items() if value is not None}
