"""Formats events and figures as text for people. Pure functions; no printing, no colour, no state.

Everything that comes from a file (paths, model output, messages) passes `clean`: a run directory may come from someone
else, and no text in it may move the cursor or act as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Event = dict[str, Any]

REMEDY_TEXTS = {
    "retry": "{what} is redone unchanged",
    "defragment": "cached memory is released and {what} is redone",
    "cut": "{what} is redone {size}",
    "checkpointing": "activations are recomputed from now on, and {what} is redone",
    "chunk_loss": "the loss is computed in smaller chunks from now on, and {what} is redone",
    "activation_offload": "activations are kept in host memory from now on, and {what} is redone",
    "max_length": "longer sequences are truncated from now on, which the recipe allows and which changes what is "
    "learned; {what} is redone",
    "optimizer_offload": "optimizer state moves to host memory, and {what} is redone",
    "stop": "every remedy is used; the run stops after a checkpoint",
    "give_up": "every remedy is used; the run stops after a checkpoint",
}
"""What each remedy means for the user. {what} is an entry of RETRIED_PARTS, {size} is how a cut is described."""

PHASE_NAMES = {
    "clip": "gradient clipping",
    "optimizer": "the optimizer step",
    "evaluate": "evaluation",
    "generate": "generation",
    "probe_forward": "the probe's forward pass",
    "probe_backward": "the probe's backward pass",
}
"""Phases of a step whose own name a user would not understand."""

RETRIED_PARTS = {
    "evaluation": "the evaluation",
    "evaluate": "that part of the evaluation",
    "generate": "that part of the evaluation",
    "probe": "the probe",
    "probe_forward": "the probe",
    "probe_backward": "the probe",
    "loading": "loading",
}
"""What is redone after an out-of-memory error, by the first word of the phase; by default the step."""


def clean(text: object) -> str:
    """Write any value as text on one line without control, format or bidirectional characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)).strip()


def format_bytes(count: float | None) -> str:
    """Format a number of bytes, in MiB below 10 GiB, else in GiB."""
    if count is None:
        return "an unknown amount"
    return f"{count / 2**20:,.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.1f} GiB"


def format_share(used: float, total: float) -> str:
    """Format two numbers of bytes in one unit, such as "6.36 of 22.50 GiB"; in MiB where `used` is below 1 GiB."""
    if used >= 2**30:
        return f"{used / 2**30:,.2f} of {total / 2**30:,.2f} GiB"
    return f"{used / 2**20:,.0f} of {total / 2**20:,.0f} MiB"


def format_number(value: object, digits: int = 4) -> str:
    """Format a number with `digits` significant digits; None becomes "not finite", because the journal records a loss
    that is not finite as null."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not finite" if value is None else clean(value)
    whole = isinstance(value, int) or abs(value) >= 10**digits
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def format_duration(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_event(event: Event) -> str | None:
    """The line that is printed for an event; None for events that have no line and only change the status block."""
    describe = EVENT_DESCRIPTIONS.get(event["kind"])
    text = describe(event) if describe is not None else None
    return None if text is None else clean(text)


def _scores(metrics: Event) -> str:
    return ", ".join(f"{clean(name).replace('_', ' ')} {format_score(name, value)}" for name, value in metrics.items())


def format_score(name: str, value: object) -> str:
    """Format the value of a metric; exact_match, the share of correct answers, is shown in percent."""
    if name == "exact_match" and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    return format_number(value)


def _eval(event: Event) -> str:
    return f"step {event['step']}: evaluation: {_scores(event['metrics'])}"


def describe_backoff(event: Event) -> str:
    """Describe an out-of-memory error: where it happened, how much memory was allocated, the remedy, and how many
    samples were lost."""
    phase = str(event["phase"])
    where = PHASE_NAMES.get(phase, phase)
    what = RETRIED_PARTS.get(phase.split()[0] if phase else "", "the step")
    held_bytes, capacity = event.get("allocated_bytes"), event.get("capacity_bytes")
    held = format_share(held_bytes, capacity) if held_bytes is not None and capacity else format_bytes(held_bytes)
    wanted = event.get("requested_bytes")
    wanted_text = f"wanted {format_bytes(wanted)}, {held} held" if wanted is not None else f"{held} held"
    remedy = REMEDY_TEXTS.get(str(event["remedy"]), f"remedy: {event['remedy']}; {{what}} is redone")
    lost = int(event.get("samples_lost") or 0)
    rank = f" on rank {event['failed_rank']}" if event.get("failed_rank") else ""
    return (
        f"step {event['step']}: out of memory in {where}{rank} ({wanted_text}); "
        f"{remedy.format(what=what, size=_cut_size(event))}; "
        f"{'no sample' if not lost else f'{lost} samples'} lost"
    )


def _cut_size(event: Event) -> str:
    """Describe how small micro-batches are after the remedy "cut": the new number of sequences if the event has one,
    else "fewer than" the number that failed."""
    after, before = event.get("sequences_after"), event.get("sequences_before")
    if isinstance(after, int):
        return f"with at most {after} sequence{'s' if after != 1 else ''} at a time"
    if isinstance(before, int) and before > 1:
        return f"with fewer than {before} sequences at a time"
    return "in smaller micro-batches"


def _checkpoint(event: Event) -> str:
    best = ", the best so far" if event.get("best") else ""
    size, seconds = format_bytes(event["size_bytes"]), event["save_seconds"]
    return f"step {event['step']}: checkpoint saved ({size}, {seconds:.1f} s{best})"


def _warning(event: Event) -> str:
    return f"warning: {event['text']}" + (f" (fix: {event['fix']})" if event.get("fix") else "")


def _control(event: Event) -> str:
    return f"{event['request']} {'accepted' if event['accepted'] else 'refused'}: {event['reason']}".rstrip(": ")


def _resumed(event: Event) -> str:
    schedule = f"; {event['schedule']}" if event.get("schedule") else ""
    return f"resumed after step {event['step']} from {event['from']}{schedule}"


OLD_VERDICTS = {"tight": "fits_smaller"}
"""Verdicts as earlier versions wrote them into plan.json and events, and as they are called now."""

REMEDY_WORDS = {
    "train.gradient_checkpointing": "gradient checkpointing",
    "train.loss": "a chunked loss",
    "train.activation_offload": "activations in host memory",
    "train.optimizer_offload": "optimizer state in host memory",
}
"""What a plan's remedies are called in a sentence; the micro-batch is named with its number."""


def describe_verdict(verdict: str, micro_batch: object = None, remedies: Mapping[str, Any] | None = None) -> str:
    """Describe a plan's verdict: "fits", "fits with micro-batch 17 in place of 64" or "does not fit".

    `micro_batch` is the number of sequences in the recipe as written, `remedies` maps recipe keys to the values with
    which the run fits. Both may be None: events of earlier versions lack them.
    """
    verdict = OLD_VERDICTS.get(verdict, verdict)
    if verdict != "fits_smaller":
        return clean(verdict).replace("_", " ")
    remedies = remedies or {}
    parts = [words for key, words in REMEDY_WORDS.items() if key in remedies]
    smaller = remedies.get("train.micro_batch")
    if isinstance(smaller, int) and smaller != micro_batch:
        instead = f" in place of {micro_batch}" if isinstance(micro_batch, int) and micro_batch > smaller else ""
        parts.append(f"micro-batch {smaller}{instead}")
    return "fits with " + (" and ".join(parts) or "a smaller micro-batch")


def _plan(event: Event) -> str:
    predicted = event["predicted"]
    peak = predicted.get("peak_bytes") if isinstance(predicted, dict) else predicted
    capacity = event.get("capacity_bytes")
    verdict = describe_verdict(str(event["verdict"]), event.get("micro_batch"), event.get("remedies"))
    size = format_share(peak, capacity) if capacity and peak is not None else format_bytes(peak)
    as_written = " as written" if verdict.startswith("fits with") else ""
    length = event.get("length")
    basis = f", for sequences of up to {length} tokens" if isinstance(length, int) else ""
    added = event.get("generate_adds_bytes")
    generate = f"; generate adds {format_bytes(added)}" if added else ""
    return f"plan: {verdict}; predicted peak{as_written} {size}{basis}{generate}"


def _phase(event: Event) -> str:
    total = event.get("total")
    progress = f" {event.get('done', 0):,} of {total:,}" if isinstance(total, int) else ""
    return f"{event['name']}{progress}" + (f": {event['detail']}" if event.get("detail") else "")


def _stage_started(event: Event) -> str | None:
    if "number" not in event:
        return None
    after = f", from {' and '.join(map(clean, event['from']))}" if event.get("from") else ""
    again = "" if event.get("from_start") else ", continued"
    return f"stage {event['number']} of {event['of']}: {event['name']}{after}{again}"


def _stage_finished(event: Event) -> str:
    peak = f", peak {format_bytes(event['peak_bytes'])}" if event.get("peak_bytes") else ""
    steps = f" at step {event['steps']}" if event.get("steps") else ""
    reason = f": {event['reason']}" if event.get("reason") else ""
    return f"stage {event['name']} {event['status']}{steps}{peak}{reason}"


def _proof(event: Event) -> str | None:
    """The line for a proof (a comparison of a fast computation with its reference) that failed; None if it passed."""
    if event["passed"] is not False:
        return None
    return f"proof of {event['name']} failed: {event['detail']}; instead: {event['fallback']}"


EVENT_DESCRIPTIONS: dict[str, Callable[[Event], str | None]] = {
    "stage_started": _stage_started,
    "stage_finished": _stage_finished,
    "plan": _plan,
    "eval": _eval,
    "backoff": describe_backoff,
    "remedy_lifted": lambda event: f"step {event['step']}: memory is available again: {event['remedy']} lifted",
    "checkpoint_saved": _checkpoint,
    "oom_report": lambda event: f"out-of-memory report: {event['path']}",
    "warning": _warning,
    "proof": _proof,
    "control": _control,
    "resumed": _resumed,
    "paused": lambda event: "paused; the device is free",
}
"""Maps each kind of event that is printed as a line to the function that writes the line. `phase` and `step` events
change the status block instead."""


def describe_phase(event: Event) -> str:
    """Describe a phase event for the status block: its name, progress and detail."""
    return clean(_phase(event))
