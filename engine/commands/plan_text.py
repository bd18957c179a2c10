"""Formats plans as text: bytes by phase and component, verdict and advice, and a simulated plan beside the memory
formula."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.config.files.text import visible
from engine.journal.event_text import describe_verdict, format_duration

if TYPE_CHECKING:
    from engine.budget.advise.auto_settings import Choice
    from engine.budget.advise.plan import Plan
    from engine.budget.advise.plan_evaluation import EvaluationPlan
    from engine.budget.advise.plan_time import PlanTime
    from engine.budget.advise.staged_plan import StagedPlan, StagePlan
    from engine.budget.predict.parallel_layout import NetworkTraffic
    from engine.config.schema.run import RunSpec
    from engine.extras.simulate.step import ExactPlan


MIB, GIB = 2**20, 2**30
NARROWEST = 40
SHARE = 8
"""Characters right of the bar, for its percentage."""
LETTERS = {
    "weights": "w", "adapters": "d", "gradients": "g", "optimizer": "o", "activations": "a", "recompute": "r",
    "loss": "l", "buffers": "b", "workspace": "k", "context": "c", "fragmentation": "f",
}  # fmt: skip
HEADS = {
    "weights": "weight", "adapters": "adapt", "gradients": "grad", "optimizer": "optim", "activations": "activ",
    "recompute": "recomp", "loss": "loss", "buffers": "buffer",
}  # fmt: skip
"""Column titles, short enough for 80 columns."""
BESIDE_TENSORS = ("context", "workspace", "fragmentation")
"""Components that are not torch's tensors; equal in all phases but for fragmentation, a share of the peak."""
OFFLOADED = {"activations": "activations", "optimizer": "optimizer state"}

WHICH_ADAFACTOR = (
    "adafactor is torch's implementation: an update is learning_rate (at most 1/sqrt(step)) times the root "
    "mean square of the weight; the Hugging Face Trainer does not scale learning_rate"
)


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    width = max(NARROWEST, width)
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def title(planned: Plan, spec: RunSpec) -> str:
    simulated = " (simulated device)" if planned.simulated else ""
    return f"{visible(spec.recipe.model.id)}, recipe {spec.recipe.name} on profile {spec.profile.name}{simulated}"


def capacity_bar(planned: Plan, width: int) -> list[str]:
    """A letter per component, then the legend; `width` is that of all lines. "!" marks where an exceeded capacity
    ends."""
    cells_wide = max(NARROWEST, width) - SHARE
    used = {name: size for name, size in planned.prediction.components.items() if size}
    scale = cells_wide / max(planned.capacity_bytes, planned.prediction.device_bytes)
    filled, held = "", 0
    for name, size in used.items():
        held += size
        filled += LETTERS[name] * (round(held * scale) - len(filled))
    cells = list(f"{filled:.<{cells_wide}}")
    legend = "  ".join(f"{LETTERS[name]}\N{NO-BREAK SPACE}{name}" for name in used)
    if planned.margin_bytes < 0:
        cells[min(round(planned.capacity_bytes * scale), cells_wide - 1)] = "!"
        legend += "  !\N{NO-BREAK SPACE}capacity"
    share = 100 * planned.prediction.device_bytes / planned.capacity_bytes
    lines = wrap_lines([legend], width)
    return [f"[{''.join(cells)}] {share:.0f} %", *(line.strip().replace("\N{NO-BREAK SPACE}", " ") for line in lines)]


def phase_table(phases: dict[str, dict[str, int]], deciding: str) -> list[str]:
    """A row per phase, a column per component; the row of `deciding`, the phase with the peak, is marked. Memory
    outside of tensors is in `beside_rows`."""
    names = [name for name in HEADS if any(parts.get(name) for parts in phases.values())]
    large = sum(phases[deciding].values()) >= GIB
    unit, digits = (GIB, 2) if large else (MIB, 1)
    head = [f"{'GiB' if large else 'MiB':<19}", *(HEADS[name] for name in names), "total"]
    rows = [head]
    for phase, parts in phases.items():
        cells = [_cell(parts.get(name, 0) / unit, digits) for name in names]
        mark = "*" if phase == deciding else " "
        rows.append([f"{mark}{phase:<18}", *cells, _cell(sum(parts.values()) / unit, digits)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def beside_rows(planned: Plan) -> list[str]:
    """torch's tensors and each component outside of them; empty where there is no such component, as on a CPU."""
    parts = {name: planned.prediction.components[name] for name in BESIDE_TENSORS}
    reserved, used = planned.prediction.reserved_context_bytes, planned.prediction.device_bytes
    if not any(parts.values()) and not reserved:
        return []
    rows = [f" {name:<18}{format_size(size, used):>12}" for name, size in parts.items()]
    if reserved:
        rows[0] += f"  ({format_size(reserved, used)} more are in device.reserve_gib)"
    return [f" {'torch tensors':<18}{format_size(planned.peak_bytes, used):>12}", *rows]


def _cell(size: float, digits: int) -> str:
    """Empty for zero, "<.1" (at one decimal) for a number that would be rounded to zero."""
    if not size:
        return ""
    text = f"{size:.{digits}f}"
    return text if float(text) else f"<{10**-digits:.{digits}f}".replace("0.", ".")


TIGHT = ", tight: the memory left is smaller than the error of a prediction"


def summary_lines(planned: Plan, spec: RunSpec) -> list[str]:
    from engine.budget.advise.levers import lever_of

    used, capacity = planned.prediction.device_bytes, planned.capacity_bytes
    rest = "left" if planned.margin_bytes >= 0 else "missing"
    each = f" on each of {planned.ranks} devices" if planned.ranks > 1 else ""
    tensor_bytes = format_size(planned.peak_bytes, used)
    tensors = f"; {tensor_bytes} of it in torch tensors" if used != planned.peak_bytes else ""
    lines = [
        verdict_sentence(planned.verdict, planned.micro_batch, planned.remedies) + (TIGHT if planned.is_tight else ""),
        f"{format_size(used, used)} of {format_size(capacity, used)}{each}, "
        f"{format_size(abs(planned.margin_bytes), used)} {rest}{tensors}",
        f"peak in {planned.prediction.deciding_phase} (*); to lower it: {lever_of(planned, spec)}",
        f"micro-batch {planned.micro_batch} × {planned.length} tokens, {planned.accumulation} per optimizer step"
        + layers_text(planned),
        *([time_sentence(planned.time, planned.length, spec)] if planned.time else []),
        length_sentence(planned, spec),
    ]
    if planned.parallel:
        lines.append(f"parallel: {planned.parallel}")
    if planned.network:
        lines.append(network_sentence(planned.network, planned.accumulation))
    if spec.recipe.train.optimizer == "adafactor":
        lines.append(WHICH_ADAFACTOR)
    if planned.predictor == "simulated":
        lines.append(f"these figures come from a simulation of the step, which took {planned.simulated_seconds:g} s")
    if planned.why_whole:
        lines.append(f"every layer was simulated, because no layer could represent similar ones ({planned.why_whole})")
    if planned.assumed:
        lines.append(planned.assumed)
    if "generate" in planned.prediction.phases:
        lines.append(generate_sentence(planned, used))
    if planned.host:
        lines.append(host_sentence(planned))
    if planned.image_tokens:
        lines.append(
            f"each sequence is planned with an image of {planned.image_tokens} tokens, the largest that is kept"
        )
    if planned.remedies:
        changes = ", ".join(f"{key} = {toml_text(value)}" for key, value in planned.remedies.items())
        start = (
            ("on this simulated device, train starts with the settings as written for demonstration, and ends with")
            if planned.simulated
            else ("train starts with")
        )
        lines.append(f"{start} {changes}; the training result stays the same")
    if planned.verdict == "does_not_fit":
        lines.append("to see what would help: tunedeck advise with the same arguments")
    return lines


def length_sentence(planned: Plan, spec: RunSpec) -> str:
    """Where the planned length comes from, the data or the recipe, and for preferences how many tokens are targets."""
    length, targets = planned.length, planned.row_targets
    if planned.basis == "data":
        counted = "" if targets is None else f"; a sample has at most {targets} target tokens"
        return f"{length} tokens is the longest sequence in the data{counted}"
    until = "; until then, every token is counted as a target" if spec.recipe.learns_preferences else ""
    return f"{length} tokens is data.max_length; to measure the data, run tunedeck data with the same recipe{until}"


def generate_sentence(planned: Plan, used: int) -> str:
    """How much generated answers add to the peak of the steps. `used`, the plan's total bytes, decides the unit."""
    needs = format_size(sum(planned.prediction.phases["generate"].values()), used)
    rows = f"generate ({planned.generation_rows} at a time)"
    if not planned.generate_adds_bytes:
        return f"{rows} adds nothing: its {needs} are below the peak of the training steps"
    return f"{rows} adds {format_size(planned.generate_adds_bytes, used)} to the peak of the training steps"


def time_sentence(time: PlanTime, length: int, spec: RunSpec) -> str:
    """Tokens per second, duration and cost, and what they rest on."""
    text = f"about {time.tokens_per_second:,.0f} tokens/s, {_seconds(time.step_seconds)} a step"
    if time.hours is not None:
        text += f", {format_duration(3600 * time.hours)} for {spec.recipe.train.max_steps:,} steps"
    if time.cost is not None:
        text += f", which cost {time.cost:,.2f} at device.price_per_hour"
    return f"{text}, if every sequence has {length} tokens; {_basis(time, spec)}"


def _basis(time: PlanTime, spec: RunSpec) -> str:
    device = spec.profile.device
    if time.basis == "profile":
        return (
            f"estimated from the profile ({device.peak_tflops:g} TFLOP/s, {device.bandwidth_gbs:g} GB/s); not "
            "calibrated on this machine"
        )
    runs = f"{time.runs} earlier run{'s' if time.runs > 1 else ''}"
    spread = f", which differ by up to {100 * time.spread:.0f} %" if time.runs > 1 else ""
    if time.basis == "same_model":
        return f"calibrated with {runs} of this model on this machine{spread}"
    return f"calibrated with runs of {time.runs} other models on this machine{spread}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else format_duration(seconds)


PART_WORDS = {
    "products": "matrix products", "between": "other operations", "recompute": "recomputation",
    "waiting": "launches and copies",
    "micro_batches": "starting micro-batches", "update": "optimizer",
}  # fmt: skip


def why_lines(considered: Sequence[Choice], planned: Plan, spec: RunSpec) -> list[str]:
    """The settings that were considered, the fastest first, and what a planned step's time is made of."""
    if not considered:
        return ["no settings were compared: the model has no memory formula"]
    capacity, factor = planned.capacity_bytes, planned.time.factor if planned.time else 1.0
    fastest = considered[0].seconds
    rows = [
        "",
        "considered, fastest first (* planned):",
        "  micro-batch  layers recomputed       memory  step time",
    ]
    for choice in considered:
        mark = "*" if (choice.rows, choice.layers) == (planned.micro_batch, planned.recomputed_layers) else " "
        seconds = _seconds(factor * choice.seconds) if planned.time else f"{choice.seconds / fastest:.2f}"
        over = "" if choice.device_bytes <= capacity else "  does not fit"
        layers, size = f"{choice.layers} of {planned.layers}", format_size(choice.device_bytes, capacity)
        rows.append(f"{mark} {choice.rows:>11}  {layers:>17}  {size:>11}  {seconds:>9}{over}")
    if spec.recipe.train.gradient_checkpointing != "auto":
        rows.append('the recipe sets train.gradient_checkpointing; "auto" would choose the fastest that fits')
    if planned.time is None:
        return [*rows, "times are relative to the fastest, because the speed of this device is unknown"]
    parts = ", ".join(f"{PART_WORDS[name]} {_seconds(each)}" for name, each in planned.time.parts.items() if each)
    return [*rows, f"parts of a step: {parts}"]


def layers_text(planned: Plan) -> str:
    """How many layers recompute their activations, in words; empty if the plan does not know the layers."""
    layers, recomputed = planned.layers, planned.recomputed_layers
    if layers is None or recomputed is None:
        return ""
    return f"; {recomputed if recomputed else 'none'} of {layers} layers recomputed"


def network_sentence(network: NetworkTraffic, micro_batches: int) -> str:
    step_bytes = network.in_a_step(micro_batches)
    in_all = f"network: each of {network.machines} machines receives at least {format_size(step_bytes, step_bytes)}"
    weights, gradients = network.weights_per_micro_batch, network.gradients_per_micro_batch
    if not weights:
        return f"{in_all} of gradients from the others per optimizer step"
    return (
        f"{in_all} from the others per optimizer step: in every micro-batch {format_size(weights, weights)} of "
        f"weights and {format_size(gradients, gradients)} of gradients, because weights are sharded over all "
        "machines; fewer and larger micro-batches, or fewer machines, exchange less"
    )


def host_sentence(planned: Plan) -> str:
    kept = " and ".join(f"{OFFLOADED[name]} {format_size(size, size)}" for name, size in planned.host.items())
    capacity = format_size(planned.host_capacity_bytes, planned.host_capacity_bytes)
    short = "" if planned.host_fits else ": TOO LITTLE"
    return f"on the host: {kept}, of {capacity} of host memory{short}"


def verdict_sentence(verdict: str, micro_batch: int, remedies: dict[str, Any]) -> str:
    words = describe_verdict(verdict, micro_batch, remedies)
    return f"{words}: one sequence does not fit, even with every remedy" if verdict == "does_not_fit" else words


def stage_lines(planned: StagedPlan, spec: RunSpec, width: int) -> list[str]:
    first = planned.stages[0].plan
    simulated = " (simulated device)" if first is not None and first.simulated else ""
    rows = [["stage", "kind", "verdict", "memory", "decides"], *(_stage_row(stage) for stage in planned.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    skipped = [stage.name for stage in spec.recipe.stages if not stage.enabled]
    lines = [f"recipe {spec.recipe.name} on profile {spec.profile.name}{simulated}, {len(planned.stages)} stages"]
    lines += [line.rstrip() for line in table]
    lines += [f"disabled: {', '.join(skipped)}"] if skipped else []
    disk, host = planned.disk_bytes, max(stage.host_bytes or 0 for stage in planned.stages)
    lines.append(
        f"{describe_verdict(planned.verdict)}; checkpoints and results of all stages take up to "
        f"{format_size(disk, disk)} of disk, tensors of one stage up to {format_size(host, host)} of host memory"
    )
    if any(stage.verdict is None and stage.kind == "train" for stage in planned.stages):
        lines.append("a stage without a plan starts with small micro-batches and adapts")
    if planned.worst is not None:
        lines.append(f"to see the largest in full: --stage {planned.worst.name}")
    return [piece for line in lines for piece in ([line] if line in table else wrap_lines([line], width))]


def _stage_row(stage: StagePlan) -> list[str]:
    capacity_bytes = stage.spec.profile.device.capacity_bytes
    if stage.plan is not None:
        used_bytes, decides = stage.plan.prediction.device_bytes, stage.plan.prediction.deciding_phase
        verdict = describe_verdict(stage.plan.verdict, stage.plan.micro_batch, stage.plan.remedies)
    elif stage.verdict is not None:
        used_bytes, verdict = stage.peak_bytes or 0, describe_verdict(stage.verdict)
        decides = "hidden states" if used_bytes else "copies tensors on the host"
    else:
        return [stage.name, stage.kind, "no plan", "", stage.unknown]
    memory = f"{format_size(used_bytes, capacity_bytes)} of {format_size(capacity_bytes, capacity_bytes)}"
    return [stage.name, stage.kind, verdict, memory, decides]


def evaluation_lines(planned: EvaluationPlan, spec: RunSpec, width: int) -> list[str]:
    """Phases, the verdict, the sequences and answers with which the evaluation begins, the key-value cache."""
    used, capacity = planned.device_bytes, planned.capacity_bytes
    simulated = " (simulated device)" if spec.profile.device.kind == "metered" else ""
    head = f"tunedeck eval of {visible(spec.recipe.model.id)}, recipe {spec.recipe.name} on one device of profile "
    rest = "left" if planned.fits else "missing"
    lines = [
        describe_verdict("fits" if planned.fits else "does_not_fit"),
        f"{format_size(used, used)} of {format_size(capacity, used)}, "
        f"{format_size(abs(capacity - used), used)} {rest}; peak in {planned.deciding_phase} (*)",
        f"evaluate starts with {planned.evaluate_rows} × {planned.length} tokens",
    ]
    if planned.generate_rows:
        cache = format_size(planned.cache_bytes, planned.cache_bytes)
        lines.append(
            f"generate starts with {planned.generate_rows} answers at once, each of up to "
            f"{spec.recipe.generate.max_new_tokens} tokens after a prompt of {planned.length}; the key-value "
            f"cache takes {cache} of that"
        )
    table = phase_table(planned.phases, planned.deciding_phase)
    title_lines = wrap_lines([f"{head}{spec.profile.name}{simulated}"], width)
    return [*title_lines, "", *table, "", *wrap_lines(lines, width)]


def residual_lines(spec: RunSpec) -> Iterator[str]:
    """Whether the figures for memory outside torch's allocator are typical or measured values."""
    from engine.budget.calibration import residuals_for

    if spec.profile.device.kind != "cuda":
        return
    if residuals_for(spec.profile) is None:
        yield "context, workspace and fragmentation are typical values; the first run on this machine measures them"
    else:
        yield "context, workspace and fragmentation are the values measured by runs on this machine"


def toml_text(value: Any) -> str:
    import tomlkit

    return tomlkit.item(value).as_string() if value is not None else "(not set)"


def format_size(size_bytes: int, beside_bytes: int) -> str:
    """In the unit that suits `beside_bytes` (GiB from 1 GiB on, else MiB), so that the two numbers can be compared."""
    if beside_bytes >= GIB:
        return f"{size_bytes / GIB:,.2f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def exact_lines(found: ExactPlan, spec: RunSpec, width: int) -> list[str]:
    simulation, used = found.simulation, found.device_bytes
    rest = "left" if found.margin_bytes >= 0 else "missing"
    summary = [
        verdict_sentence(found.verdict, found.micro_batch, {}),
        f"{format_size(used, used)} of {format_size(found.capacity_bytes, used)}, "
        f"{format_size(abs(found.margin_bytes), used)} {rest}; peak in {simulation.deciding_phase} (*)",
        f"micro-batch {found.micro_batch} × {found.length} tokens, {found.accumulation} per optimizer step",
    ]
    if any(found.beside.values()):
        beside = ", ".join(f"{name} {format_size(held, used)}" for name, held in found.beside.items())
        summary.append(f"memory outside tensors, from the plan: {beside}")
    head = f"{visible(spec.recipe.model.id)}: a training step was simulated; no memory was allocated"
    rows = phase_table(simulation.phases, simulation.deciding_phase)
    return [*wrap_lines([head], width), "", *rows, "", *_compared(found), *wrap_lines(summary, width)]


def _compared(found: ExactPlan) -> Iterator[str]:
    """A row per phase: simulated bytes, the memory formula's prediction and its error."""
    if found.closed_form is None:
        yield "no memory formula for this architecture"
        yield ""
        return
    yield f"{'':<19}{'simulated':>14}{'formula':>14}"
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
