"""Plans, trains and opens one model family with one method; or asks `recipes check` why it is refused.

Called by `benchmarks.families`, in a process for each family.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.predict.simulated import keep_simulation
from engine.checks.run import problems_of_run
from engine.commands.background import simulation
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, TunedeckError
from engine.extras.handover.merge import merge
from engine.journal.directory import RunDirectory
from engine.launch.create_run import create_run
from engine.model.config import silence_libraries
from tests.model.samples import batch_of, load, logits_of, run_spec, write_model
from tests.train.run_helpers import Event, losses, make_spec, of_kind, train, write_samples

STEPS, ROWS = 3, 8
CAP = 0.75
"""Device memory of the capped run, as a share of the roomy run's peak."""
LOSSES_EQUAL, LOGITS_EQUAL = 1e-5, 1e-4
"""Largest relative difference of losses, and largest difference of logits as a share of the largest one."""

Cell = dict[str, Any]


class Problem(Exception):
    """Raised with a sentence that says what a model failed at."""


def spec_of(model: Path, method: str, samples: Path, memory_gib: float) -> RunSpec:
    """Return the run spec of three steps in fp32 of the model in the folder `model`, trained with `method` ("lora" or
    "full") on the file `samples` on a metered device of `memory_gib`. LoRA recomputes activations, which is the
    default; full fine-tuning keeps them."""
    return make_spec(
        samples,
        memory_gib=memory_gib,
        model={"id": str(model), "init": "pretrained"},
        method={"kind": method},
        train={
            "max_steps": STEPS, "batch_size": ROWS, "micro_batch": ROWS, "gradient_checkpointing": method == "lora",
        },
    )  # fmt: skip


def refused(model_type: str, config: dict[str, Any], method: str, folder: Path) -> Cell:
    """Return {"refused": the one sentence with which `recipes check` or creating the run refuses the family};
    {"failed": sentence} if there is not exactly one problem. Files are written into `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}), "utf-8")
    spec = run_spec(str(folder), method={"kind": method}, init="random", tokenizer="builtin:bytes")
    problems = problems_of_run(spec)
    if not problems:
        try:
            create_run(spec, folder / "runs")
        except TunedeckError as error:
            problems = ["; ".join(text for text in (error.found, error.fix) if text)]
    if len(problems) != 1:
        return {"failed": f"{len(problems)} problems in place of one: {problems}"}
    return {"refused": problems[0].replace(str(folder), "the model")}


def trained(model_type: str, config: dict[str, Any], method: str, folder: Path) -> Cell:
    """Plan a family, train it with much and with little memory, and open the result; files are written into `folder`.
    Returns the errors of the prediction, the losses and the logit difference, or {"failed": sentence} if any part goes
    wrong."""
    silence_libraries()
    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True)
    try:
        model = write_model(folder / "model", model_type, **config)
        samples = write_samples(folder / "samples.jsonl", count=STEPS * ROWS)
        plan = planned(spec_of(model, method, samples, 8.0))
        _, roomy = finished(spec_of(model, method, samples, 8.0), folder / "roomy")
        measured = roomy[-1]["measured"]
        gib = CAP * measured["peak_bytes"] / 2**30
        place, capped = finished(spec_of(model, method, samples, gib), folder / "capped")
        return {
            "plan": plan.predictor,
            "simulated_seconds": plan.simulated_seconds,
            **compared(plan, roomy, capped),
            "logit_difference": logit_difference(place, model, method, folder / "merged"),
        }
    except (Problem, TunedeckError) as error:
        return {"failed": str(error)}


def planned(spec: RunSpec) -> Plan:
    """Return the plan of a run. A simulation that the plan needs is made in this process."""
    try:
        return make_plan(spec)
    except NotSimulatedError:
        keep_simulation(spec, simulation(spec))
        return make_plan(spec)


def finished(spec: RunSpec, folder: Path) -> tuple[RunDirectory, list[Event]]:
    """Create a run and train it; returns its directory and events. Raises Problem if it does not finish."""
    place, _ = create_run(spec, folder, force=True)
    code, events = train(place)
    if code != 0:
        raise Problem(f"the run ended with exit code {code}: {error_of(events)}")
    return place, events


def error_of(events: list[Event]) -> str:
    return str(events[-1].get("error") or "no error is named").splitlines()[0]


def compared(plan: Plan, roomy: list[Event], capped: list[Event]) -> Cell:
    """Compare a family's run with much memory (`roomy`) and with little (`capped`), by their events. Returns the
    relative error of the predicted peak, the remedies of the capped run, the losses and their largest relative
    difference.

    Raises Problem if `roomy` ran out of memory or `capped` did not, if their losses differ, or if training did not
    change the loss.
    """
    measured = roomy[-1]["measured"]
    if "predicted" not in measured:
        raise Problem("the run had no plan")
    remedies = [event["remedy"] for event in of_kind(capped, "backoff")]
    if of_kind(roomy, "backoff") or not remedies:
        raise Problem(f"{len(remedies)} out-of-memory errors with little memory, or some with much")
    one, other = losses(roomy), losses(capped)
    difference = max(abs(other[step] / one[step] - 1) for step in range(1, STEPS + 1))
    if difference > LOSSES_EQUAL:
        raise Problem(f"the losses differ by {difference:.1e}: {list(one.values())} and {list(other.values())}")
    if one[1] == one[STEPS]:
        raise Problem(f"the loss stays {one[1]}")
    return {
        "peak_error": measured["predicted"]["peak_bytes"] / measured["peak_bytes"] - 1,
        "remedies": remedies,
        "losses": list(one.values()),
        "loss_difference": difference,
    }


def logit_difference(place: RunDirectory, model: Path, method: str, merged: Path) -> float:
    """Return the largest difference between logits of the engine's model and of the result opened without it, as a
    share of the largest logit. An adapter is merged into the folder `merged` for this. Raises Problem if the difference
    is too large, or if training has changed no logit."""
    batch = batch_of()
    result = place.adapter if method == "lora" else place.model
    mine = logits_of(load(run_spec(str(result), method={"kind": method})).model, batch)
    before = logits_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), batch)
    if torch.allclose(before, mine, atol=0.0):
        raise Problem("training has changed no logit")
    scale = float(mine.abs().max())
    found = {name: float((logits - mine).abs().max()) / scale for name, logits in opened(place, model, method, merged)}
    for name, difference in found.items():
        if not difference <= LOGITS_EQUAL:
            raise Problem(f"the logits of the result, {name}, differ by {difference:.1e}")
    return max(found.values())


def opened(place: RunDirectory, model: Path, method: str, merged: Path) -> list[tuple[str, torch.Tensor]]:
    """Open the result of a run without the engine in each possible way; returns (sentence that names the way, logits)
    for each. An adapter is merged into the folder `merged` for this."""
    batch = batch_of()
    if method == "full":
        return [("opened by transformers", logits_of(AutoModelForCausalLM.from_pretrained(place.model), batch))]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        beside = logits_of(PeftModel.from_pretrained(base, place.adapter), batch)
    merge(place.adapter, merged, lambda text: None)
    alone = logits_of(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), batch)
    return [("opened by peft", beside), ("merged", alone)]
