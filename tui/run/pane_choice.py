"""Which panes of the Run screen are shown at a size of the terminal, and which one the keys act on.

Try: `python -c "from tui.run.pane_choice import PaneChoice; print(sorted(PaneChoice(room='regular').shown))"`
"""

from __future__ import annotations

from dataclasses import dataclass

PANES = ("loss", "figures", "ranks", "gpus", "events", "log", "memory", "samples")
"""All panes, in the order in which `tab` goes through them."""

UPPER = ("loss",)
"""The pane that is always shown where there is room for more than one."""


@dataclass
class PaneChoice:
    """The pane that the keys act on, and the panes that are shown beside it."""

    room: str = "all"
    """How many panes the terminal has room for: "all"; "regular" (the plot and one other); or "one"."""
    active: str = "events"
    """The pane that the keys act on."""
    enlarged: bool = False
    """Whether the active pane takes the whole screen."""
    has_ranks: bool = False
    """Whether the run has several processes, and a pane for them."""
    has_gpus: bool = False
    """Whether the run has recorded readings of GPUs, and a pane for them."""
    has_samples: bool = False
    """Whether the run has generated samples."""
    samples_beside: bool = False
    """Whether there is room for the samples beside all other panes; else they take the place of the memory."""
    _below: str = "events"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of this run's panes, in the order in which the Tab key goes through them."""
        # With room for all panes, the line of figures above the plot says what the pane of figures does.
        has = {"ranks": self.has_ranks, "gpus": self.has_gpus, "samples": self.has_samples,
               "figures": self.room != "all"}  # fmt: skip
        return tuple(name for name in PANES if has.get(name, True))

    @property
    def shown(self) -> set[str]:
        """The names of the panes that fit the room: only the active one if it is enlarged or there is room for one."""
        if self.enlarged or self.room == "one":
            return {self.active}
        if self.room != "all":
            return {*UPPER, self.below}
        left_out = set() if self.samples_beside else {"memory" if self.active == "samples" else "samples"}
        return set(self.names) - left_out

    @property
    def below(self) -> str:
        """The name of the pane below the upper panes, where there is room for one: the active pane if it is no upper
        one, else the last such pane that was active."""
        return self.active if self.active not in UPPER else self._below

    @property
    def tabs(self) -> tuple[str, ...]:
        """The panes of which only one is shown, to be named in a row of tabs; empty if every pane is shown."""
        if self.enlarged or self.room == "all":
            return ()
        return self.names if self.room == "one" else tuple(name for name in self.names if name not in UPPER)

    def activate(self, name: str) -> None:
        """Make `name` the active pane. A pane that is unknown, or that the run does not have, is ignored."""
        if name in self.names:
            self.active = name
            self._below = self.below

    def step(self, by: int) -> None:
        """Make the pane `by` places after the active one active, or before it if `by` is negative; after the last comes
        the first."""
        names = self.names
        self.activate(names[(names.index(self.active) + by) % len(names)])
