"""Events and figures as text for people. Pure functions; no printing, no colour, no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

Event = dict[str, Any]

REMEDY_TEXTS = {
    "retry": "{what} is redone unchanged",
    "defragment": "cached memory is released and {what} is redone",
    "cut": "{what} is redone {size}",
    "checkpointing": "activations{layers} are recomputed from now on, and {what} is redone",
    "chunk_loss": "the loss is computed in smaller chunks from now on, and {what} is redone",
    "tile_mlp": "feed-forward blocks are computed in smaller pieces from now on, and {what} is redone",
    "activation_offload": "activations are kept in host memory from now on, and {what} is redone",
    "max_length": "longer sequences are truncated from now on, which the recipe allows and which changes the training "
    "result; {what} is redone",
    "optimizer_offload": "optimizer state moves to host memory, and {what} is redone",
    "stop": "no remedy that backoff.ladder allows is left; the run {ends}",
    "give_up": "no remedy that backoff.ladder allows is left; the run {ends}",
}
"""{what} is an entry of RETRIED_PARTS, {size} how a cut is described, {layers} of how many layers, {ends} how a run
ends in this step: in the first there is nothing to write a checkpoint of."""

PHASE_NAMES = {
    "clip": "gradient clipping",
    "optimizer": "the optimizer step",
    "evaluate": "evaluation",
    "generate": "generation",
    "probe_forward": "the forward pass of the memory test",
    "probe_backward": "the backward pass of the memory test",
}
"""Phases of a step whose own name a user would not understand."""

RETRIED_PARTS = {
    "evaluation": "the evaluation",
    "evaluate": "that part of the evaluation",
    "generate": "that part of the evaluation",
    "probe": "the memory test",
    "probe_forward": "the memory test",
    "probe_backward": "the memory test",
    "loading": "loading",
}
"""What is redone after an out-of-memory error, by the phase's first word; by default the step."""


def clean(text: object) -> str:
    """Any value on one line without control, format or bidirectional characters. What comes from a file passes it: no
    text in someone else's run directory may move the cursor."""
    whole = str(text)
    if whole.isprintable():  # a list of thousands of runs spends a fifth of its time here
        return whole.strip()
    return "".join(letter if letter.isprintable() else " " for letter in whole).strip()


def on_one_line(text: object) -> str:
    """An error of several lines, such as its fix below it, as one line of `clean` text with semicolons."""
    return "; ".join(clean(line) for line in str(text).splitlines() if line.strip())


def format_bytes(count: float | None) -> str:
    """In MiB below 10 GiB, else in GiB."""
    if count is None:
        return "an unknown amount"
    return f"{count / 2**20:,.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.1f} GiB"


def format_share(used: float, total: float) -> str:
    """In one unit: "6.36 of 22.50 GiB"; MiB where `used` is below 1 GiB; with as many digits more, up to three, as it
    takes to tell them apart."""
    unit, name, digits = (2**30, "GiB", 2) if used >= 2**30 else (2**20, "MiB", 0)
    for more in range(4):
        low, high = (f"{size / unit:,.{digits + more}f}" for size in (used, total))
        if low != high or used == total:
            break
    return f"{low} of {high} {name}"


def speed_text(slower_percent: float) -> str:
    """An estimate of a change's step time, such as "about 12 % slower"."""
    if abs(slower_percent) < 0.5:
        return "same speed"
    return f"about {abs(slower_percent):.0f} % {'slower' if slower_percent > 0 else 'faster'}"


def format_number(value: object) -> str:
    """With four significant digits; None is "not finite": the journal has null for a loss that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not finite" if value is None else clean(value)
    whole = isinstance(value, int) or abs(value) >= 10_000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """As h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ready_at(seconds: float, now: datetime | None = None) -> str:
    """When something that ends in `seconds` is ready, in local time: "ready at 21:40", with the day after midnight."""
    now = now or datetime.now().astimezone()
    end = now + timedelta(seconds=seconds)
    return f"ready at {end:%H:%M}" if end.date() == now.date() else f"ready on {end:%a %d %b} at {end:%H:%M}"


def describe_event(event: Event) -> str | None:
    """None for events that only change the status block."""
    describe = EVENT_DESCRIPTIONS.get(event["kind"])
    text = describe(event) if describe is not None else None
    return None if text is None else clean(text)


def _scores(metrics: Event) -> str:
    return ", ".join(f"{clean(name).replace('_', ' ')} {format_score(name, value)}" for name, value in metrics.items())


def format_score(name: str, value: object) -> str:
    """exact_match, a share, is shown in percent."""
    if name == "exact_match" and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    return format_number(value)


def _eval(event: Event) -> str:
    return f"step {event['step']}: evaluation: {_scores(event['metrics'])}"


def describe_backoff(event: Event) -> str:
    """Where an out-of-memory error happened, how much was allocated, the remedy, and how many samples were lost."""
    phase = str(event["phase"])
    where = PHASE_NAMES.get(phase, phase)
    what = RETRIED_PARTS.get(phase.split()[0] if phase else "", "the step")
    held_bytes, capacity = event.get("allocated_bytes"), event.get("capacity_bytes")
    held = format_share(held_bytes, capacity) if held_bytes is not None and capacity else format_bytes(held_bytes)
    wanted = event.get("requested_bytes")
    wanted_text = f"wanted {format_bytes(wanted)}, {held} held" if wanted is not None else f"{held} held"
    if wanted is not None and held_bytes is not None and capacity:
        wanted_text = _wanted_text(wanted, held_bytes, capacity) or wanted_text
    remedy = REMEDY_TEXTS.get(str(event["remedy"]), f"remedy: {event['remedy']}; {{what}} is redone")
    lost = int(event.get("samples_lost") or 0)
    rank = f" on rank {event['failed_rank']}" if event.get("failed_rank") else ""
    return (
        f"step {event['step']}: out of memory in {where}{rank} ({wanted_text}); "
        f"{remedy.format(what=what, size=_cut_size(event), layers=layers_text(event), ends=ends_text(event))}; "
        f"{'no sample' if not lost else f'{lost} samples'} lost"
    )


def _wanted_text(wanted: float, held: float, capacity: float) -> str:
    """What was wanted and held, with as many digits as it takes to see that both together exceed the capacity; empty
    where they do not, as in fragmented memory, or where whole MiB show it."""
    for digits in range(3):
        asked, kept, room = (round(size / 2**20, digits) for size in (wanted, held, capacity))
        if asked + kept > room and wanted + held > capacity:
            texts = (f"{size:,.{digits}f}" for size in (asked, kept, room))
            return "wanted {} MiB, {} of {} MiB held".format(*texts) if digits else ""
    return ""


def _cut_size(event: Event) -> str:
    """The new number of sequences if the event has one, else "fewer than" the number that failed."""
    after, before = event.get("sequences_after"), event.get("sequences_before")
    if isinstance(after, int):
        return f"with at most {after} sequence{'s' if after != 1 else ''} at a time"
    if isinstance(before, int) and before > 1:
        return f"with fewer than {before} sequences at a time"
    return "in smaller micro-batches"


def layers_text(event: Event) -> str:
    """How many layers recompute; empty for events of earlier versions, which say true."""
    after = event.get("after")
    if not isinstance(after, int) or isinstance(after, bool):
        return ""
    return f" of {after} layer{'s' if after != 1 else ''}"


def ends_text(event: Event) -> str:
    """How a run ends that finds no remedy: what was learned before the step is saved."""
    step = event.get("step")
    return "stops after a checkpoint" if isinstance(step, int) and step > 1 else "ends"


def _checkpoint(event: Event) -> str:
    best = ", the best until now" if event.get("best") else ""
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
"""Verdicts of earlier versions' files, and as they are called now."""

REMEDY_WORDS = {
    "train.gradient_checkpointing": "gradient checkpointing",
    "train.loss": "a chunked loss",
    "train.mlp_tiles": "feed-forward blocks in pieces",
    "train.activation_offload": "activations in host memory",
    "train.optimizer_offload": "optimizer state in host memory",
}
"""Words for a plan's remedies; the micro-batch is named with its number."""


def describe_verdict(verdict: str, micro_batch: object = None, remedies: Mapping[str, Any] | None = None) -> str:
    """A plan's verdict: "fits", "fits with micro-batch 17 in place of 64" or "does not fit". `micro_batch` and
    `remedies` (recipe key = value with which the run fits) may be None: events of earlier versions lack them."""
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
    length, targets = event.get("length"), event.get("target_tokens")
    basis = f", for sequences of up to {length} tokens" if isinstance(length, int) else ""
    if isinstance(length, int) and isinstance(targets, int) and targets < length:
        basis += f" ({targets} target tokens)"
    added = event.get("generate_adds_bytes")
    generate = f"; generate adds {format_bytes(added)}" if added else ""
    return f"plan: {verdict}; predicted peak{as_written} {size}{basis}{generate}"


def _micro_batch(event: Event) -> str | None:
    """None where another line has said it: the plan's, or that of the out-of-memory error before."""
    before, now, reason = event.get("before"), event["sequences"], event["reason"]
    if before == now or reason in ("as planned", "memory ran out"):
        return None
    return f"step {event['step']}: micro-batch {now}{f' in place of {before}' if before else ''}: {reason}"


def _phase(event: Event) -> str:
    total = event.get("total")
    progress = f" {event.get('done') or 0:,} of {total:,}" if isinstance(total, int) else ""
    return f"{event['name']}{progress}" + (f": {event['detail']}" if event.get("detail") else "")


def _stage_started(event: Event) -> str | None:
    if "number" not in event:
        return None
    after = f", from {' and '.join(map(clean, event['from']))}" if event.get("from") else ""
    again = "" if event.get("from_start") else ", continued"
    return f"stage {event['number']} of {event.get('of')}: {event.get('name')}{after}{again}"


def _stage_finished(event: Event) -> str:
    peak = f", peak {format_bytes(event['peak_bytes'])}" if event.get("peak_bytes") else ""
    steps = f" at step {event['steps']}" if event.get("steps") else ""
    reason = f": {event['reason']}" if event.get("reason") else ""
    return f"stage {event['name']} {event['status']}{steps}{peak}{reason}"


def _proof(event: Event) -> str | None:
    """None if the proof (a comparison of a fast computation with its reference) passed."""
    if event["passed"] is not False:
        return None
    return f"check of {event['name']} failed: {event['detail']}; fallback: {event['fallback']}"


EVENT_DESCRIPTIONS: dict[str, Callable[[Event], str | None]] = {
    "stage_started": _stage_started,
    "stage_finished": _stage_finished,
    "plan": _plan,
    "micro_batch": _micro_batch,
    "eval": _eval,
    "backoff": describe_backoff,
    "remedy_lifted": lambda event: f"step {event['step']}: memory is available again; {event['remedy']} was reverted",
    "checkpoint_saved": _checkpoint,
    "oom_report": lambda event: f"out-of-memory report: {event['path']}",
    "warning": _warning,
    "proof": _proof,
    "control": _control,
    "resumed": _resumed,
    "paused": lambda event: "paused; the device is free",
}
"""`phase` and `step` have no line: they change the status block."""


def describe_phase(event: Event) -> str:
    return clean(_phase(event))
