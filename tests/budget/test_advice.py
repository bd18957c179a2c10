"""What `fit` suggests: settings that the rules of recipes accept, that reach the memory they promise, and that are
marked if they change results."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from benchmarks.advice import broken_offers, overlooked, questions
from engine.architecture.lookup import find_facts
from engine.budget.advise.levers import is_refused, lever_of
from engine.budget.advise.plan import make_plan
from engine.budget.advise.search import Trial, advise, changed, fits, possible_levers
from engine.config.changes import with_changes
from engine.config.schema.run import RunSpec
from tests.budget.metered_step import run_spec

MODEL = "Qwen/Qwen2.5-1.5B"


def spec_on(memory_gib: float, parallel: dict[str, Any] | None = None, model: str = MODEL, **tables: Any) -> RunSpec:
    count = 4 if parallel else 1
    host = tables.pop("host_gib", 512.0)
    device = {
        "kind": "cuda", "memory_gib": memory_gib, "compute_capability": 9.0, "count": count, "host_memory_gib": host
    }  # fmt: skip
    changes = {f"parallel.{key}": value for key, value in (parallel or {}).items()}
    return with_changes(run_spec(model, device, **tables), changes)


def test_sequences_that_devices_share_are_offered() -> None:
    lora = {"data": {"max_length": 262_144}, "train": {"batch_size": 4}}
    advice = advise(spec_on(76.6, {"strategy": "sharded"}, model="Qwen/Qwen3-4B-Instruct-2507", **lora))
    assert advice.plan.verdict != "fits"
    assert any("parallel.sequence" in suggestion.changes for suggestion in advice.suggestions)


@pytest.mark.parametrize("method", [{"kind": "full"}, {"rank": 64}], ids=str)
def test_in_shards_nothing_is_offered_that_shards_refuse(method: dict[str, Any]) -> None:
    roomy = spec_on(400.0, {"strategy": "sharded"}, method=method, data={"max_length": 512})
    needs_gib = make_plan(roomy).prediction.device_bytes / 2**30
    spec = with_changes(roomy, {"device.memory_gib": 0.6 * needs_gib, "train.micro_batch": 4})
    offered = [suggestion.changes for suggestion in advise(spec).suggestions]
    assert not any({"train.optimizer", "model.quantize"} & changes.keys() for changes in offered)
    assert "8bit" not in lever_of(make_plan(spec), spec) and "nf4" not in lever_of(make_plan(spec), spec)


def test_offers_that_change_arithmetic_say_so() -> None:
    roomy = spec_on(400.0, method={"kind": "full"}, data={"max_length": 256}, train={"micro_batch": 1})
    tight = with_changes(roomy, {"device.memory_gib": 0.75 * make_plan(roomy).prediction.device_bytes / 2**30})
    advice = advise(tight)
    marked = {key: one.changes_arithmetic for one in advice.suggestions for key in one.changes if len(one.changes) == 1}
    assert marked["train.optimizer"] and not marked["train.optimizer_offload"]
    first = advice.suggestions[0]
    assert first.as_json()["changes_arithmetic"] and "changes arithmetic" in first.summary
    without_host = advise(with_changes(tight, {"device.host_memory_gib": 1.0}))
    assert not any("train.optimizer_offload" in suggestion.changes for suggestion in without_host.suggestions)


def test_a_change_that_leaves_less_than_a_predictions_error_stands_behind_a_roomier_one() -> None:
    train = {"gradient_checkpointing": False, "micro_batch": 4, "batch_size": 8, "loss": "plain"}
    roomy = spec_on(400.0, data={"max_length": 512}, train=train)
    reserved_gib = 400.0 - make_plan(roomy).capacity_bytes / 2**30
    short_gib = 0.9 * make_plan(roomy).prediction.device_bytes / 2**30
    chunked = advise(with_changes(roomy, {"device.memory_gib": short_gib})).suggestions[0].plan
    chunked_gib = 1.004 * chunked.prediction.device_bytes / 2**30
    advice = advise(with_changes(roomy, {"device.memory_gib": chunked_gib + reserved_gib}))
    found = [(*suggestion.changes, suggestion.plan.is_tight) for suggestion in advice.suggestions[:2]]
    assert found == [("train.micro_batch", False), ("train.loss", True)]
    assert advice.suggestions[1].slower_percent < advice.suggestions[0].slower_percent


def test_where_the_device_s_speed_is_known_offers_are_ranked_by_predicted_time() -> None:
    train = {"gradient_checkpointing": False, "micro_batch": 8, "batch_size": 8}
    spec = spec_on(80.0, model="meta-llama/Llama-3.1-8B", data={"max_length": 4096}, train=train)
    known = with_changes(spec, {"device.peak_tflops": 989.4, "device.bandwidth_gbs": 3350.0})
    unknown, advice = advise(spec), advise(known)
    assert {offer.tokens_per_second for offer in unknown.suggestions} == {None}
    offers = {tuple(offer.changes): offer for offer in advice.suggestions}
    recomputing, before = offers[("train.gradient_checkpointing",)], advice.plan.time
    after = recomputing.plan.time
    assert before is not None and after is not None
    assert recomputing.tokens_per_second == pytest.approx(after.tokens_per_second, rel=1e-3)
    assert recomputing.slower_percent == pytest.approx(
        100 * (before.tokens_per_second / after.tokens_per_second - 1), abs=0.06
    )
    same = [offer.slower_percent for offer in advice.suggestions if not offer.changes_learning]
    assert len(same) > 1 and same == sorted(same)


def test_an_offload_that_the_host_cannot_hold_is_taken_back() -> None:
    spec = spec_on(80.0, host_gib=2.0, method={"kind": "full"}, train={"optimizer_offload": True})
    assert make_plan(spec).verdict == "fits" and not make_plan(spec).host_fits
    assert advise(spec).suggestions[0].changes == {"train.optimizer_offload": (True, False)}


@pytest.mark.parametrize("share", [0.9, 0.6, 0.35])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_no_cheaper_set_of_levers_is_overlooked(kind: str, share: float) -> None:
    train = {"gradient_checkpointing": False, "micro_batch": 4, "batch_size": 8, "loss": "plain"}
    roomy = spec_on(400.0, method={"kind": kind}, data={"max_length": 512}, train=train)
    spec = with_changes(roomy, {"device.memory_gib": share * make_plan(roomy).prediction.device_bytes / 2**30})
    facts = find_facts(spec.recipe.model)
    advice, trial = advise(spec), Trial(spec, None, facts)
    assert advice.plan.verdict != "fits" and advice.suggestions
    for suggestion in advice.suggestions:
        assert fits(suggestion.plan) and not is_refused(changed(spec, suggestion.levers), facts)
    levers = possible_levers(spec, advice.plan, facts)
    least = min(sum(lever.cost for lever in each.levers) for each in advice.suggestions)  # a tight one stands behind
    for size in (1, 2, 3):
        for chosen in combinations(levers, size):
            if sum(lever.cost for lever in chosen) < least and len({key for one in chosen for key in one.keys}) == size:
                assert not trial.fits(chosen) or is_refused(changed(spec, chosen), facts), [
                    one.changes for one in chosen
                ]


def test_offers_to_random_questions_are_accepted_and_plan_as_they_say() -> None:
    """Tests six random run specs; `python -m benchmarks.advice` tests many."""
    for question, spec in questions(6, seed=3):
        advice = advise(spec)
        assert not broken_offers(question, advice)
        assert not overlooked(spec, advice, most_sets=100)
