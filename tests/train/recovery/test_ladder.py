"""The backoff ladder as a pure function: which remedy is chosen for which failure, and which settings it makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.device.oom import OutOfMemory
from engine.train.step.failures import RankOom, memory_exhausted
from engine.train.step.ladder import RUNGS, SETTING_OF_REMEDY, BackoffContext, MemorySettings, choose

SETTINGS = MemorySettings(1000, 0, 1024, False, False, None)
FAILURE = OutOfMemory("device", 4096, "full", "forward", 900, 900)
LADDER = list(RUNGS)


def context(rows: int = 4, length: int = 100) -> BackoffContext:
    """A micro-batch of `rows` sequences failed on a device of its own; nothing was tried, nothing has succeeded yet."""
    micro_batch = MicroBatch(tuple(range(rows)), length, 200 * rows)
    return BackoffContext(
        RankOom(FAILURE, 0, micro_batch, 2000, 0), SETTINGS, MicroBatchBudget(1000, 1000), [], 2000, 500,
        on_plain_cpu=False, layers=16, tiles_mlp=True, has_optimizer_state=True, planned_chunk_tokens=110,
    )  # fmt: skip


def test_every_rung_that_changes_anything_changes_its_own_setting_and_no_other() -> None:
    one_row = context(rows=1)
    for name, rung in RUNGS.items():
        settings = rung(context() if name == "cut" else one_row)
        if name in SETTING_OF_REMEDY:
            assert settings is not None
            assert settings == SETTINGS.with_value(name, settings.value_of(name)) != SETTINGS
        else:
            assert settings in (None, SETTINGS)


def test_rungs_change_nothing_by_themselves() -> None:
    now = context()
    budget = now.budget.as_json()
    for rung in RUNGS.values():
        rung(now)
    assert now.budget.as_json() == budget and now.settings == SETTINGS


def test_several_sequences_are_cut_and_one_is_recomputed() -> None:
    assert choose(LADDER, context()) == ("cut", replace(SETTINGS, micro_batch_budget=640))
    assert choose(LADDER, context(rows=1)) == ("checkpointing", replace(SETTINGS, checkpointing=2))


def test_as_many_layers_recompute_as_the_prediction_asks_for() -> None:
    """1,500 bytes of room; with n of 16 layers the micro-batch takes 2,400 - 100 n, so 10 layers leave 3 % to spare."""
    now = replace(
        context(rows=1), cost_recomputing=lambda layers: lambda rows, length, patches=None: 2400 - 100 * layers
    )
    assert choose(LADDER, now) == ("checkpointing", replace(SETTINGS, checkpointing=10))
    measured = MicroBatchBudget(1000, 1000, slope=2.0)
    assert choose(LADDER, replace(now, budget=measured)) == ("checkpointing", replace(SETTINGS, checkpointing=16))
    again = replace(now, settings=replace(SETTINGS, checkpointing=10))
    assert choose(LADDER, again) == ("checkpointing", replace(SETTINGS, checkpointing=12)), "it was too low"
    all_of_them = replace(now, settings=replace(SETTINGS, checkpointing=16))
    chosen = choose(LADDER, all_of_them)
    assert chosen is not None and chosen[0] == "chunk_loss"


def test_a_model_that_cannot_recompute_goes_on_to_the_next_rung() -> None:
    chosen = choose(LADDER, replace(context(rows=1), layers=0))
    assert chosen == ("chunk_loss", replace(SETTINGS, chunk_tokens=50))


def test_a_loss_that_is_not_in_chunks_is_first_put_into_chunks() -> None:
    whole = replace(context(rows=1), settings=replace(SETTINGS, chunk_tokens=None, checkpointing=16))
    assert choose(LADDER, whole) == ("chunk_loss", replace(whole.settings, chunk_tokens=110))


def test_a_chunk_is_halved_from_the_targets_that_there_may_be() -> None:
    few = replace(context(rows=1), layers=0, row_targets=80)
    assert choose(LADDER, few) == ("chunk_loss", replace(SETTINGS, chunk_tokens=40))


def test_blocks_are_tiled_before_anything_moves_to_the_host() -> None:
    short = replace(SETTINGS, checkpointing=16, chunk_tokens=16)
    now = replace(context(rows=1), settings=short)
    assert choose(LADDER, now) == ("tile_mlp", replace(short, mlp_tiles=4))
    further = replace(now, settings=replace(short, mlp_tiles=4))
    chosen = choose(LADDER, further)
    assert chosen is not None and chosen[0] == "activation_offload", "pieces of 100 / 8 tokens are too short"
    longer = replace(context(rows=1, length=4096), settings=replace(short, mlp_tiles=4))
    assert choose(LADDER, longer) == ("tile_mlp", replace(short, mlp_tiles=8))
    mixture = choose(LADDER, replace(now, tiles_mlp=False))
    assert mixture is not None and mixture[0] == "activation_offload"


def test_what_has_succeeded_before_is_repeated_once() -> None:
    budget = MicroBatchBudget(1000, 1000, proven_bytes=800)
    assert choose(LADDER, replace(context(), budget=budget)) == ("retry", SETTINGS)
    chosen = choose(LADDER, replace(context(), budget=budget, tried=["retry"]))
    assert chosen is not None and chosen[0] == "cut"


def test_memory_that_is_only_fragmented_is_tried_again_once() -> None:
    now = replace(context(), oom=replace(context().oom, failure=replace(FAILURE, reserved_bytes=900 + 4096)))
    assert choose(LADDER, now) == ("defragment", SETTINGS)
    chosen = choose(LADDER, replace(now, tried=["defragment"]))
    assert chosen is not None and chosen[0] == "cut"


def test_host_memory_is_only_waited_for() -> None:
    now = replace(context(), oom=replace(context().oom, failure=replace(FAILURE, kind="host")))
    assert choose(LADDER, now) == ("retry", SETTINGS)
    assert choose(LADDER, replace(now, tried=["retry"])) == ("retry", SETTINGS)
    assert choose(LADDER, replace(now, tried=["retry", "retry"])) is None


@pytest.mark.parametrize("rung", ["activation_offload", "optimizer_offload"])
def test_on_the_plain_cpu_nothing_is_moved_to_the_host(rung: str) -> None:
    assert RUNGS[rung](replace(context(rows=1), on_plain_cpu=True)) is None


def test_sequences_get_shorter_by_a_quarter_and_not_without_end() -> None:
    assert RUNGS["max_length"](context(rows=1)) == replace(SETTINGS, max_length=75)
    assert RUNGS["max_length"](context(rows=1, length=20)) == replace(SETTINGS, max_length=16)
    assert RUNGS["max_length"](context(rows=1, length=16)) is None


def test_the_last_word_counts_the_sequences_and_blames_the_ladder() -> None:
    many, one = (memory_exhausted(context(rows=rows).oom, "").found for rows in (64, 1))
    assert "with 64 sequences of 100 tokens, and no remedy that backoff.ladder allows is left" in many
    assert "with one sequence of 100 tokens" in one
