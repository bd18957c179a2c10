"""Formats a simulated plan as text: its table of phases, and for each phase the prediction of the closed form, which is
the formula that a plan uses without `--exact`.

Try: `tunedeck plan -p demo -r demo --exact`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.commands.plan_text import format_size, phase_table, verdict_sentence, wrap_lines
from engine.spec.files.text import visible

if TYPE_CHECKING:
    from engine.simulate.plan import ExactPlan
    from engine.spec.schema.run import RunSpec


def exact_lines(found: ExactPlan, spec: RunSpec, width: int) -> list[str]:
    """Format the simulated plan as lines of text: the table of phases, the comparison with the closed form, the
    verdict."""
    simulation, used = found.simulation, found.device_bytes
    rest = "left" if found.margin_bytes >= 0 else "missing"
    summary = [
        verdict_sentence(found.verdict, found.micro_batch, {}),
        f"{format_size(used, used)} of {format_size(found.capacity_bytes, used)}, "
        f"{format_size(abs(found.margin_bytes), used)} {rest}; {simulation.deciding_phase} decides (*)",
        f"micro-batch {found.micro_batch} × {found.length} tokens, {found.accumulation} per optimizer step",
    ]
    if any(found.beside.values()):
        beside = ", ".join(f"{name} {format_size(held, used)}" for name, held in found.beside.items())
        summary.append(f"memory outside tensors, from the plan: {beside}")
    head = f"{visible(spec.recipe.model.id)}: the engine's own step was simulated; no memory was allocated"
    rows = phase_table(simulation.phases, simulation.deciding_phase)
    return [*wrap_lines([head], width), "", *rows, "", *_compared(found), *wrap_lines(summary, width)]


def _compared(found: ExactPlan) -> Iterator[str]:
    """Yield the lines of a table with one row per phase: the simulated bytes, the closed form's prediction and its
    error."""
    if found.closed_form is None:
        yield "the closed form does not know this architecture"
        yield ""
        return
    yield f"{'':<19}{'simulated':>14}{'closed form':>14}"
    sums, used = found.simulation.sums, found.device_bytes
    for phase, row in found.closed_form.items():
        predicted_bytes = sum(row.values())
        if phase in sums:
            simulated, predicted = format_size(sums[phase], used), format_size(predicted_bytes, used)
            error_percent = 100 * (predicted_bytes / sums[phase] - 1)
            yield f" {phase:<18}{simulated:>14}{predicted:>14}{error_percent:>+9.2f} %"
        elif phase != "load":
            yield f" {phase:<18}{'not simulated':>14}{format_size(predicted_bytes, used):>14}"
    yield ""
