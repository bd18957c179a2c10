"""Alerts: what a person who watches a run would point at. A spike of the gradient norm, a plateau of the loss, values
that are not finite, and steps that wait for data become warnings that belong to a step.

Every rule compares the run with its own recent steps, so none needs to know the model. A rule that has spoken is silent
for a while: a mark on the plot, not a flood.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from engine.journal.events import Journal

RECENT_STEPS = 50
"""Steps that the next one is compared with."""

LEAST_STEPS = 20
"""Steps before anything is compared: warm-up is no spike."""

SPIKE = 5.0
"""A gradient norm of this many times the median of the recent ones is a spike."""

QUIET_STEPS = 50
"""Least steps between two alerts of one kind."""

PLATEAU_SHARE = 0.2
PLATEAU_LEAST_STEPS = 100
"""The loss is on a plateau when its mean over RECENT_STEPS has found no new minimum for this share of the run, at least
for so many steps."""

PLATEAU_GAIN = 0.005
"""Share by which a mean must be below the least one so far to be a new minimum."""

PLATEAU_BEFORE = 0.8
"""Share of the run after which no plateau is reported: a loss that has converged at the end is what one wants."""

SLOW_DATA = 0.25
"""Share of the time of the recent steps that was spent waiting for data, above which the data are slow."""

SLOW_LEAST_SECONDS = 2.0
"""Least seconds waited in the recent steps: what is less nobody feels, and it may be noise."""


ZERO_STEPS = 3
"""Steps without any gradient, the first of a process, after which the run is said to train nothing; fewer if it has
fewer."""


class AlertMonitor:
    """Watches the steps of one engine process and writes the warnings `no_gradient`, `gradient_spike`, `plateau`,
    `not_finite` and `slow_data`, each with its step."""

    def __init__(self, journal: Journal, total_steps: int) -> None:
        self._journal, self._total_steps = journal, total_steps
        self._norms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._losses: deque[float] = deque(maxlen=RECENT_STEPS)
        self._waits: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Seconds waited for data, and seconds in all, of each step."""
        self._least_loss, self._least_at = math.inf, 0
        self._zero_steps: int | None = 0
        """Steps so far, while none had a gradient; None since one had."""
        self._spoke: dict[str, int] = {}
        """The step of the latest alert of each kind."""

    def after_step(self, step: int, *, loss: float, grad_norm: float, waited: float, seconds: float) -> None:
        """Look at a step that was applied: its loss, gradient norm, seconds waited for data and seconds in all."""
        self._look_for_zero(step, grad_norm)
        self._look_for_spike(step, grad_norm)
        self._look_for_plateau(step, loss)
        self._waits.append((waited, seconds))
        waits = [sum(column) for column in zip(*self._waits, strict=True)]
        if len(self._waits) >= LEAST_STEPS and waits[0] > max(SLOW_DATA * waits[1], SLOW_LEAST_SECONDS):
            share = f"{100 * waits[0] / waits[1]:.0f} %"
            fix = "raise data.workers, or put the data on a faster disk"
            self._say("slow_data", step, f"the last {len(self._waits)} steps spent {share} of their time waiting "
"for data", fix)  # fmt: skip

    def not_finite(self, step: int, what: str) -> None:
        """A step whose loss or gradients are not finite; `what` says what became of it."""
        fix = "lower train.learning_rate, or raise train.warmup_steps"
        self._say("not_finite", step, f"loss or gradients of step {step} are not finite: {what}", fix)

    def _look_for_zero(self, step: int, grad_norm: float) -> None:
        if self._zero_steps is None:
            return
        self._zero_steps = self._zero_steps + 1 if grad_norm == 0.0 else None
        if self._zero_steps is not None and (self._zero_steps == ZERO_STEPS or step == self._total_steps):
            text = f"the gradient is 0 in every step until step {step}: nothing is trained"
            fix = (
                "train weights that the samples use ([method]), or check the samples: tunedeck data -r RECIPE --show 1"
            )
            self._say("no_gradient", step, text, fix)
            self._zero_steps = None

    def _look_for_spike(self, step: int, grad_norm: float) -> None:
        if len(self._norms) >= LEAST_STEPS:
            usual = statistics.median(self._norms)
            if usual > 0 and grad_norm > SPIKE * usual:
                text = (
                    f"the gradient norm of step {step} is {grad_norm:.4g}, {grad_norm / usual:.0f} times the "
                    "usual value"
                )
                fix = "lower train.max_grad_norm; if it happens again, check the samples of this step"
                self._say("gradient_spike", step, text, fix)
        self._norms.append(grad_norm)

    def _look_for_plateau(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        mean = statistics.fmean(self._losses)
        if len(self._losses) < LEAST_STEPS or mean < self._least_loss * (1 - PLATEAU_GAIN):
            self._least_loss, self._least_at = mean, step
            return
        steps = step - self._least_at
        patience = max(PLATEAU_LEAST_STEPS, PLATEAU_SHARE * self._total_steps)
        if steps >= patience and step <= PLATEAU_BEFORE * self._total_steps:
            text = f"the loss has not improved for {steps} steps; the mean of the last ones is {mean:.4g}"
            self._say(
                "plateau", step, text, "change train.learning_rate, or stop earlier with eval.early_stopping_patience"
            )
            self._least_at = step

    def _say(self, code: str, step: int, text: str, fix: str) -> None:
        if step - self._spoke.get(code, -QUIET_STEPS) >= QUIET_STEPS:
            self._spoke[code] = step
            self._journal.warn(code, text, fix, step=step)
