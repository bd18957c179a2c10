"""The text that commands print for a person while a run is in progress."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from engine.commands.follow import LiveReporter, PlainReporter
from engine.journal.event_schema import EVENT_KINDS
from engine.journal.event_text import (
    EVENT_DESCRIPTIONS,
    clean,
    describe_event,
    describe_verdict,
    format_bytes,
    format_share,
)
from engine.journal.summary import summarise
from engine.journal.summary_text import Progress, result_rows
from engine.launch.changed_keys import find_changes, makes_longer, notices_of, refused_changes
from tests.journal.event_fields import backoff_fields, step_fields
from tests.tui.recorded_runs import make_run


def event(kind: str, **fields: object) -> dict[str, object]:
    return {"kind": kind, "time": "2026-11-20T20:58:00.000Z", **fields}


def test_a_backoff_is_a_sentence() -> None:
    text = describe_event(event("backoff", **backoff_fields(12, sequences_after=8, capacity_bytes=256 << 20)))
    assert text == (
        "step 12: out of memory in backward (wanted 24 MiB, 230 of 256 MiB held); "
        "the step is redone with at most 8 sequences at a time; no sample lost"
    )


@pytest.mark.parametrize(
    ("verdict", "micro_batch", "remedies", "words"),
    [
        ("fits", 4, {}, "fits"),
        ("fits_smaller", 64, {"train.micro_batch": 17}, "fits with micro-batch 17 in place of 64"),
        ("fits_smaller", 1, {"train.gradient_checkpointing": True, "train.micro_batch": 4},
         "fits with gradient checkpointing and micro-batch 4"),
        ("fits_smaller", 1, {"train.loss": "chunked", "train.micro_batch": 1}, "fits with a chunked loss"),
        ("does_not_fit", 1, {}, "does not fit"),
        ("tight", 64, None, "fits with a smaller micro-batch"),
    ],
)  # fmt: skip
def test_a_verdict_is_said_in_words(
    verdict: str, micro_batch: int, remedies: dict[str, object] | None, words: str
) -> None:
    assert describe_verdict(verdict, micro_batch, remedies) == words


def test_two_sizes_beside_each_other_have_one_unit() -> None:
    assert format_share(6516 * 2**20, 22.5 * 2**30) == "6.36 of 22.50 GiB"
    assert format_share(63.9 * 2**20, 64 * 2**20) == "63.9 of 64.0 MiB"
    assert format_share(56 * 2**20, 18.75 * 2**30) == "56 of 19,200 MiB"


def test_the_plan_of_a_run_of_an_earlier_version_is_readable() -> None:
    old = event("plan", predicted={"peak_bytes": 127 << 20}, verdict="tight", capacity_bytes=64 << 20, micro_batch=64)
    assert describe_event(old) == "plan: fits with a smaller micro-batch; predicted peak as written 127 of 64 MiB"
    progress = Progress("demo", simulated=True)
    progress.take(old)
    assert progress.state.predicted["verdict"] == "fits_smaller"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequences_after": 1}, "with at most 1 sequence at a time"),
        ({"sequences_before": 8}, "with fewer than 8 sequences at a time"),
        ({"sequences_before": 1}, "in smaller micro-batches"),
        ({"remedy": "stop"}, "no remedy that backoff.ladder allows is left"),
        ({"phase": "evaluation"}, "the evaluation is redone"),
        ({"requested_bytes": None}, "(230 MiB held)"),
        ({"failed_rank": 2}, "on rank 2"),
        ({"samples_lost": 3}, "3 samples lost"),
    ],
)
def test_a_backoff_says(fields: dict[str, object], words: str) -> None:
    assert words in str(describe_event(event("backoff", **backoff_fields(1, **fields))))


@pytest.mark.parametrize("kind", sorted(EVENT_DESCRIPTIONS))
def test_a_sentence_needs_no_more_than_the_required_fields(kind: str) -> None:
    fields: dict[str, object] = dict.fromkeys(EVENT_KINDS[kind].required, 1)
    fields |= {"metrics": {"loss": None}} if kind == "eval" else {}
    fields |= {"name": "a", "number": 1, "of": 2} if kind == "stage_started" else {}  # the conductor's, not an engine's
    fields |= {"passed": False} if kind == "proof" else {}  # what passed is not printed
    text = describe_event(event(kind, **fields))
    assert text and "\n" not in text


def test_every_rung_of_the_ladder_has_words() -> None:
    from typing import get_args

    from engine.config.schema.recipe import Rung

    for remedy in get_args(Rung):
        assert "remedy:" not in str(describe_event(event("backoff", **backoff_fields(1, remedy=remedy))))


def test_text_from_files_cannot_move_the_cursor() -> None:
    assert clean("a\x1b[2Jb\nc\u202ed\x07") == "a [2Jb c d"


def test_sizes_are_comparable() -> None:
    assert (format_bytes(230 << 20), format_bytes(80 << 30), format_bytes(None)) == (
        "230 MiB",
        "80.0 GiB",
        "an unknown amount",
    )


def test_the_status_says_step_loss_speed_memory_and_time_left() -> None:
    progress = Progress("demo", simulated=True, capacity_bytes=256 << 20)
    progress.take(event("stage_started", max_steps=10))
    progress.take(event("step", **step_fields(4)))
    assert progress.lines() == [
        "demo: training, step 4 of 10, 0:03 left",
        "  loss 0.25, 1,000 tokens/s, memory 200 of 256 MiB (simulated device)",
    ]


def test_a_phase_is_shown_before_the_first_step() -> None:
    progress = Progress("demo", simulated=False)
    assert progress.lines() == ["demo: starting"]
    progress.take(event("phase", name="tokenising", done=10, total=2000))
    assert progress.lines() == ["demo: tokenising 10 of 2,000"]


def test_plain_output_has_no_control_codes_and_few_lines() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(Progress("demo", simulated=False), stream)
    for step in range(1, 100):
        reporter.event(event("step", **step_fields(step)))
    reporter.event(event("eval", step=99, metrics={"exact_match": 0.955}))
    assert stream.getvalue().splitlines()[1:] == ["step 99: evaluation: exact match 95.5 %"]
    assert "\x1b" not in stream.getvalue()


def test_lasting_lines_stay_above_the_block_and_markup_is_text() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, markup=False, no_color=True)
    reporter = LiveReporter(Progress("[bold]demo[/nope]", simulated=False), console)
    reporter.event(event("warning", code="x", text="mind [red]this[/red]", fix=""))
    reporter.tick()
    reporter.close()
    assert "mind [red]this[/red]" in stream.getvalue() and "[bold]demo[/nope]" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


TRAIN = {"epochs": 1.0, "max_steps": None, "seed": 0, "learning_rate": 1e-4, "micro_batch": "auto", "batch_size": 4}


@pytest.mark.parametrize(
    ("changes", "is_refused", "is_said", "longer"),
    [
        ({"seed": 1}, True, False, False),
        ({"batch_size": 8}, True, False, False),
        ({"micro_batch": 4}, False, False, False),
        ({"learning_rate": 1e-5}, False, True, False),
        ({"epochs": 2.0}, False, False, True),
        ({"epochs": 0.5}, False, False, False),
    ],
)
def test_what_resume_may_change(changes: dict[str, object], is_refused: bool, is_said: bool, longer: bool) -> None:
    found = find_changes({"recipe": {"train": TRAIN}}, {"recipe": {"train": {**TRAIN, **changes}}})
    assert (bool(refused_changes(found)), bool(notices_of(found)), makes_longer(found)) == (is_refused, is_said, longer)


@pytest.mark.parametrize(
    "key", ["model.id", "model.dtype", "method.rank", "data.sources", "data.max_length", "train.optimizer", "a.new_key"]
)
def test_resume_refuses_what_reaches_back_and_what_nobody_has_decided_on(key: str) -> None:
    assert refused_changes({f"recipe.{key}": (0, 1)}) != []


@pytest.mark.parametrize(
    ("status", "words"),
    [("done", "1 time, survived"), ("oom", "1 time, the last one ended the run"), ("queued", "never")],
)
def test_a_run_that_memory_ended_did_not_survive_it(tmp_path: Path, status: str, words: str) -> None:
    assert ("out of memory", words) in result_rows(summarise(make_run(tmp_path, status=status)))


def test_what_was_wanted_and_held_is_seen_to_exceed_the_device() -> None:
    sizes = {"requested_bytes": 1_342_177, "allocated_bytes": 66_511_000, "capacity_bytes": 64 << 20}
    text = describe_event(event("backoff", **backoff_fields(1, **sizes)))
    assert "wanted 1.3 MiB, 63.4 of 64.0 MiB held" in str(text)
    fragmented = {"requested_bytes": 1 << 20, "allocated_bytes": 10 << 20, "capacity_bytes": 64 << 20}
    assert "wanted 1 MiB, 10 of 64 MiB held" in str(describe_event(event("backoff", **backoff_fields(1, **fragmented))))


@pytest.mark.parametrize(("step", "ends"), [(1, "left; the run ends; no"), (2, "the run stops after a checkpoint")])
def test_a_checkpoint_is_promised_only_where_there_is_something_to_save(step: int, ends: str) -> None:
    assert ends in str(describe_event(event("backoff", **backoff_fields(step, remedy="give_up"))))
