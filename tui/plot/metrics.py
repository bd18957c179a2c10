"""The metrics of a run that plots can show, and where a run's journal has them.

Try: `python -c "from tui.plot.metrics import METRICS; print([metric.label for metric in METRICS])"`
"""

from __future__ import annotations

from typing import NamedTuple

from engine.journal.events import Event

GIB, MIB = 2.0**30, 2.0**20


class Metric(NamedTuple):
    """A number that events of one kind have."""

    label: str
    """The metric's name with its unit, for the title of a plot."""
    kind: str
    """The kind of the events: "step", "eval" or "gpu"."""
    field: str
    """The event's field; of an evaluation, the key in its `metrics`."""
    unit_size: float = 1.0
    """The value is divided by this, to be in the unit that the label names."""

    def for_capacity(self, capacity_bytes: int) -> Metric:
        """The peak of memory in MiB, if a run may use less than one GiB; else, or if that is unknown, the metric."""
        if self.field != "peak_bytes" or not 0 < capacity_bytes < GIB:
            return self
        return self._replace(label=self.label.replace("GiB", "MiB"), unit_size=MIB)

    def value_in(self, event: Event) -> float | None:
        """The value in an event, in the label's unit; None if the event does not have one."""
        if event["kind"] != self.kind:
            return None
        table = event.get("metrics") if self.kind == "eval" else event
        value = table.get(self.field) if isinstance(table, dict) else None
        return value / self.unit_size if isinstance(value, int | float) else None


LOSS = Metric("loss", "step", "loss")

METRICS = (
    LOSS,
    Metric("evaluation loss", "eval", "loss"),
    Metric("learning rate", "step", "learning_rate"),
    Metric("gradient norm", "step", "grad_norm"),
    Metric("tokens/s", "step", "tokens_per_second"),
    Metric("peak memory, GiB", "step", "peak_bytes", GIB),
    Metric("GPU memory, GiB", "gpu", "used_bytes", GIB),
    Metric("GPU use, %", "gpu", "utilisation_percent"),
    Metric("GPU temperature, °C", "gpu", "temperature_celsius"),
    Metric("GPU power, W", "gpu", "power_watts"),
)
"""All metrics, in the order in which a key goes through them. Of several GPUs, each reading is a point."""


def metric_beside(metric: Metric, by: int) -> Metric:
    """Return the metric `by` places after `metric` in METRICS (before it if `by` is negative); after the last comes the
    first."""
    fields = [(each.kind, each.field) for each in METRICS]
    return METRICS[(fields.index((metric.kind, metric.field)) + by) % len(METRICS)]
