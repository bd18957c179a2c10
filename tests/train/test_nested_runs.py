"""Text runs of models whose config nests the language model beside a vision encoder: planned as measured, frozen vision
encoder and all, packed, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.budget.advise.plan import make_plan
from engine.budget.predict.simulated import keep_simulation
from engine.commands.background import simulation
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.device.allocation_tracker import bytes_of
from engine.errors import NotSimulatedError
from engine.launch.create_run import create_run
from tests.nested_models import write_nested
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5, full": ("qwen3_5", {"method": {"kind": "full"}, "train": {"gradient_checkpointing": False}}),
    "llama4, packed": ("llama4", {"method": {"kind": "lora"}, "data": {"packing": True}}),
    "mllama, answers": ("mllama", {"method": {"kind": "lora"}, "eval": {"metrics": ["loss", "exact_match"]}}),
    "mistral3, packed": ("mistral3", {"method": {"kind": "lora"}, "data": {"packing": True}}),
    "qwen3_vl, full": ("qwen3_vl", {"method": {"kind": "full"}, "train": {"gradient_checkpointing": False}}),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", count=20, longest=400)


def spec_of(model: Path, samples: Path, steps: int, tables: dict[str, Any]) -> RunSpec:
    data: dict[str, Any] = {"max_length": 512}
    answers: dict[str, Any] = {}
    if "eval" in tables:
        data, answers = {**data, "valid_fraction": 0.1}, {"generate": {"max_new_tokens": 6}}
    tables = {
        "model": {"id": str(model), "tokenizer": None, "init": "pretrained"}, **answers, **tables,
        "data": {**data, **tables.get("data", {})},
        "train": {"max_steps": steps, "micro_batch": 8, **tables.get("train", {})},
    }  # fmt: skip
    return make_spec(samples, **tables)


def plan_of(spec: RunSpec) -> Any:
    """The plan of a run, simulated here if it must be."""
    try:
        return make_plan(spec)
    except NotSimulatedError:
        keep_simulation(spec, simulation(spec))
        return make_plan(spec)


# Simulating the linear attention of qwen3_5 takes half a minute; tests/budget/test_simulated.py has it alone.
LONG = ("qwen3_5, full", "llama4, packed")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.torture) if case in LONG else case for case in CASES]
)
def test_a_text_run_is_planned_as_it_is_measured(case: str, samples: Path, tmp_path: Path) -> None:
    family, tables = CASES[case]
    model = write_nested(tmp_path / "model", family)
    spec = spec_of(model, samples, 2, tables)
    weights = bytes_of(load_file(model / "model.safetensors").values())
    plan = plan_of(spec)
    assert plan.prediction.components["weights"] == weights
    place, _ = create_run(spec, tmp_path / "runs")
    code, events = train(place)
    assert code == 0, events[-1]
    measured = events[-1]["measured"]
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)
    assert measured["components"]["weights"] == weights


def test_a_resumed_text_run_ends_with_the_weights_of_one_without_interruption(samples: Path, tmp_path: Path) -> None:
    """Also where layers of the decoder get no gradient, because they attend to images."""
    model = write_nested(tmp_path / "model", "mllama")
    full = {"method": {"kind": "full"}, "train": {"scheduler": "constant"}}
    whole, legs = (
        new_run(tmp_path / name, spec_of(model, samples, steps, full)) for name, steps in (("a", 4), ("b", 2))
    )
    assert train(whole)[0] == train(legs)[0] == 0
    legs.run_toml.write_text(dump_run_spec(spec_of(model, samples, 4, full)))
    code, events = train(legs, resume=True)
    assert code == 0 and of_kind(events, "resumed") and len(losses(events)) == 4
    one, other = (load_file(place.model / "model.safetensors") for place in (whole, legs))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
