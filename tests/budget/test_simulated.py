"""Predictions for families without a closed form: the needed simulation is made without being requested, stored, and
used again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.type_configs import tiny_config
from engine.architecture.facts import from_config
from engine.batching.predicted_cost import micro_batch_cost
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import find_predictor
from engine.budget.predict.shapes import MicroBatchShape
from engine.budget.predict.simulated import SimulatedPredictor, keep_simulation, simulation_key
from engine.cli import app, run
from engine.commands.background import simulation
from engine.config.files.caches import SequenceBounds
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem, NotSimulatedError, UnknownArchitectureError, UsageError
from engine.extras.simulate.curves import _document, simulate_curves
from engine.extras.simulate.device import SimulatedDevice
from engine.extras.simulate.driver import on_meta, simulated_run
from engine.extras.simulate.layers import LayerStack
from engine.extras.simulate.recorders import PhaseLog
from engine.extras.simulate.step import exact_plan, simulate_step
from tests.budget.metered_step import MISTRAL, folder_of, measured_step, run_spec
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

OPT: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 900, "hidden_size": 128, "ffn_dim": 384, "num_hidden_layers": 5,
    "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 128, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "dropout": 0.0,
}  # fmt: skip
SHALLOW = {**OPT, "num_hidden_layers": 1}
NARROW: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: list[dict[str, Any]] = [
    {**OPT, "hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": 2048},
    {"model_type": "smollm3", **NARROW},
    {
        "model_type": "qwen3_5_text", **NARROW, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    {
        "model_type": "llama4_text", **NARROW, "intermediate_size_mlp": 128, "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
    },
    {
        "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 1, "state_size": 16, "num_heads": 4,
        "head_dim": 32, "n_groups": 1, "chunk_size": 64, "pad_token_id": 0,
    },
]  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", **NARROW, "vocab_size": 1000, "vocab_size_per_layer_input": 1000,
    "hidden_size_per_layer_input": 8, "global_head_dim": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32, "use_double_wide_mlp": True,
}  # fmt: skip
KEPT = {"batch_size": 8, "gradient_checkpointing": False}
TABLES: dict[str, Any] = {"method": {"kind": "full"}, "train": KEPT, "model": {"dtype": "float32"}}


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of five layers; the simulation of its full fine-tuning is stored."""
    folder = folder_of(OPT, tmp_path_factory.mktemp("opt"))
    spec = run_spec(folder, **TABLES)
    with pytest.raises(NotSimulatedError):
        find_predictor(spec)
    keep_simulation(spec, simulate_curves(spec))
    return folder


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of one layer."""
    return folder_of(SHALLOW, tmp_path_factory.mktemp("shallow"))


def invoke(command: str, folder: Path, *sets: str, as_json: bool = True) -> Result:
    """Run a command on the demo's data and device."""
    flags = [flag for text in (f"model.id={folder}", *sets) for flag in ("--set", text)]
    return CliRunner().invoke(app, [command, "-p", "demo", "-r", "demo", *flags, *["--json"] * as_json])


def kept() -> set[Path]:
    """The files of the simulations that are stored on this machine."""
    return set(Path(os.environ["TUNEDECK_CACHE"], "simulations").glob("*.json"))


@pytest.mark.parametrize(("rows", "length"), [(1, 300), (4, 64)])
def test_other_shapes_and_more_layers_follow_from_those_that_were_simulated(opt: Path, rows: int, length: int) -> None:
    """The stored simulation has run three of five layers, with other numbers of targets. The step here has five layers,
    and nearly all of its tokens are targets."""
    spec = run_spec(opt, **TABLES)
    found, predictor = simulate_step(spec, rows=rows, length=length), find_predictor(spec)
    predicted = predictor.predict_shape(MicroBatchShape(rows, length, rows * (length - 1) - 1, True))
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=2e-3)
    sums = {phase: sum(row.values()) for phase, row in predicted.phases.items()}
    assert {phase: sums[phase] for phase in found.sums} == pytest.approx(found.sums, rel=0.01)
    assert micro_batch_cost(spec, SequenceBounds(length)).cost(rows, length) == pytest.approx(
        predictor.predict(rows, length).peak_bytes - found.static_bytes, rel=0.05
    )


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        (FAMILIES[0], 50_000),
        (FAMILIES[0], 150_000),
        (FAMILIES[1], 50_000),
        # Their layers take half a minute to simulate; the loss behind them is the same code.
        *(
            pytest.param(config, size, marks=pytest.mark.torture)
            for config, size in zip(FAMILIES[2:], (150_000, 150_000, 50_000), strict=True)
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_the_loss_of_a_large_vocabulary_takes_one_chunk_of_logits(
    config: dict[str, Any], vocabulary: int, tmp_path: Path
) -> None:
    """The simulated loss has two chunks, the steps here one to 37; their logits take most of the memory."""
    folder = folder_of({**config, "vocab_size": vocabulary}, tmp_path)
    spec = run_spec(folder, train={"batch_size": 16}, model={"dtype": "bfloat16"}, data={"max_length": 2048})
    predictor = SimulatedPredictor(spec, simulate_curves(spec))
    for rows, length in ((1, 200), (8, 1022)):
        found = simulate_step(spec, rows=rows, length=length)
        predicted = predictor.predict_shape(MicroBatchShape(rows, length, rows * (length - 1) - 1, True))
        assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=2e-3), (rows, length)


@pytest.mark.parametrize("method", [{"kind": "lora"}, {"kind": "full"}], ids=lambda method: method["kind"])
def test_layers_of_different_sizes_are_planned_as_they_are_measured(method: dict[str, Any], tmp_path: Path) -> None:
    """Gemma 4: wider heads in some layers, keys and values of other layers, an embedding for each layer."""
    train = {"batch_size": 8, "gradient_checkpointing": method["kind"] == "lora"}
    spec = run_spec(folder_of(GEMMA4, tmp_path), method=method, train=train, data={"max_length": 512})
    predictor = SimulatedPredictor(spec, simulate_curves(spec))
    static_bytes, peak_bytes = measured_step(spec, 4, 300, micro_batches=2)
    predicted = predictor.predict_shape(MicroBatchShape(4, 300, 4 * 299 - 1, True))
    assert predictor.static_bytes == pytest.approx(static_bytes, rel=5e-3)
    assert predicted.peak_bytes == pytest.approx(peak_bytes, rel=5e-3)


EVALUATING: dict[str, Any] = {"data": {"max_length": 512, "valid_fraction": 0.1}}
GENERATING: dict[str, Any] = {**EVALUATING, "eval": {"samples": 2}, "generate": {"max_new_tokens": 8}}


def _with_indexer() -> dict[str, Any]:
    """GLM 5: an indexer chooses the tokens that are attended to, and its adapters get no gradient."""
    config = tiny_config("glm_moe_dsa").to_dict()
    kinds = {key: [config[key][0], *[config[key][-1]] * 4] for key in ("layer_types", "mlp_layer_types")}
    return {**config, **kinds, "indexer_types": ["full"] * 5, "vocab_size": 500, "num_hidden_layers": 5}


SHARING: dict[str, Any] = {
    **GEMMA4, "vocab_size": 500, "num_hidden_layers": 10, "num_kv_shared_layers": 5,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 5, "full_attention"],
}  # fmt: skip
"""Gemma 4 E4B: the last layers use keys and values of earlier ones, and the last of them makes their gradients."""


@pytest.mark.parametrize(
    ("kind", "config", "tables", "of_each_kind"),
    [
        ("lora", _with_indexer(), EVALUATING, 1),
        # SmolLM3: every fourth layer has no rotary positions. The first and the last layer are run in any case.
        ("full", {**FAMILIES[1], "vocab_size": 500, "num_hidden_layers": 6}, GENERATING, 1),
        ("lora", SHARING, {}, 2),
    ],
    ids=["indexer", "kinds of layers", "shared keys"],
)
def test_some_layers_of_a_kind_stand_for_all(
    kind: str, config: dict[str, Any], tables: dict[str, Any], of_each_kind: int, tmp_path: Path
) -> None:
    spec = run_spec(folder_of(config, tmp_path), method={"kind": kind}, train={"batch_size": 4}, **tables)
    with simulated_run(spec, PhaseLog) as run:
        stack = LayerStack(run.loaded.base)
        stack.choose(of_each_kind)
        assert sum(stack.left_out.values()) == 2
    sizes = [2, 4], [128, 256, 384]
    few, every = (_document(spec, config, sizes, of_each_kind=some) for some in (of_each_kind, None))
    assert few is not None and every is not None
    assert ("generate" in tables) == (every["generate"] is not None)
    if every["generate"] is not None:
        units = np.array([[1, rows, rows * prompt, rows * prompt**2] for rows, prompt in ((1, 200), (4, 900))])
        assert units @ few.pop("generate") == pytest.approx(units @ every.pop("generate"), rel=1e-3)
    assert str(few) == str(every)


@pytest.mark.parametrize(("rows", "length"), [(4, 20), (3, 64), (2, 65), (3, 100), (1, 400)])
def test_layers_that_pad_to_a_chunk_are_planned_at_any_length(rows: int, length: int, linear: RunSpec) -> None:
    """Qwen3.5's linear attention pads to 64 tokens."""
    predictor, found = find_predictor(linear), simulate_step(linear, rows=rows, length=length)
    predicted = predictor.predict_shape(MicroBatchShape(rows, length, rows * (length - 1) - 1, True))
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=2e-2)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Full fine-tuning of a tiny Qwen3.5, whose simulation is stored."""
    config = {**FAMILIES[2], "vocab_size": 500}
    spec = run_spec(folder_of(config, tmp_path_factory.mktemp("linear")), **TABLES)
    keep_simulation(spec, simulate_curves(spec))
    return spec


def test_a_window_that_sequences_reach_makes_another_simulation_also_where_the_text_model_is_nested(
    tmp_path: Path,
) -> None:
    config = {"model_type": "gemma4", "text_config": {**GEMMA4, "sliding_window": 64}}
    folder = folder_of(config, tmp_path)
    short, longer, long = (simulation_key(run_spec(folder, data={"max_length": each})) for each in (64, 65, 900))
    assert short != longer == long


def test_a_known_family_whose_layers_differ_is_simulated() -> None:
    config = {**MISTRAL, "per_layer_config": {"1": {"intermediate_size": 64}}}
    with pytest.raises(UnknownArchitectureError, match="layers of this mistral model differ"):
        from_config(config)
    assert from_config({**MISTRAL, "per_layer_config": {}}) == from_config(MISTRAL)


def test_a_run_is_compared_with_its_simulation(opt: Path, tmp_path: Path) -> None:
    """The rows differ in length, and only their completions are targets."""
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), model={"id": str(opt)}, train={**KEPT, "max_steps": 2})
    code, events = train(new_run(tmp_path / "runs", spec))
    measured = of_kind(events, "run_finished")[0]["measured"]
    assert code == 0
    assert of_kind(events, "plan")
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.01)


def test_plan_simulates_unasked_and_then_remembers(shallow: Path) -> None:
    before = kept()
    first = invoke("plan", shallow, "train.micro_batch=auto")
    assert first.exit_code == 0, first.output
    assert "simulating a step" in first.stderr
    (made,) = kept() - before
    document = json.loads(first.stdout)
    assert document["predictor"] == "simulated"
    assert document["simulated_seconds"] > 0
    stamp = made.stat().st_mtime_ns
    again = invoke("plan", shallow, "train.micro_batch=auto")
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert (made.stat().st_mtime_ns, kept() - before) == (stamp, {made})
    text = " ".join(invoke("plan", shallow, "train.micro_batch=auto", as_json=False).stdout.split())
    assert "(*); to lower it: " in text and "figures come from a simulation of the step" in text
    assert kept() - before == {made}


def test_fit_simulates_what_it_tries(shallow: Path) -> None:
    found = invoke("advise", shallow, "train.micro_batch=auto")
    document = json.loads(found.stdout)
    assert document["plan"]["predictor"] == "simulated"
    assert ["data.max_length"] in [list(each["changes"]) for each in document["room"]]


@pytest.mark.parametrize("command", ["plan", "advise", "train"])
def test_what_is_refused_is_refused_before_anything_is_simulated(
    command: str, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = kept()
    found = invoke(command, shallow, "train.optimizer=adamw_8bit", "train.max_grad_norm=0.5")
    assert isinstance(found.exception, UsageError)
    assert "simulated" not in found.stderr
    assert kept() == before


def test_a_process_that_ends_without_a_result_is_quoted_and_the_suggested_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process cannot keep its result, because a file lies where the folder of results would be."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "simulations").touch()
    monkeypatch.setenv("TUNEDECK_CACHE", str(cache))
    folder = folder_of({**SHALLOW, "max_position_embeddings": 64}, tmp_path / "model")
    found = invoke("plan", folder, "data.max_length=64").exception
    assert isinstance(found, EnvironmentProblem)
    assert f"simulation of {folder} ended without a result: unexpected FileExistsError" in found.found
    assert found.fix == "see its error: tunedeck plan with the same arguments and --exact --debug"
    sets = ("--set", f"model.id={folder}", "--set", "data.max_length=64")
    monkeypatch.setattr("sys.argv", ["tunedeck", "plan", "-p", "demo", "-r", "demo", *sets, "--exact", "--debug"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0


def test_an_exact_plan_compares_a_simulation_with_no_other(opt: Path) -> None:
    """Neither before one is kept nor after: both are no closed form."""
    unknown, known = run_spec(opt, method={"kind": "lora"}), run_spec(opt, **TABLES)
    for spec in (unknown, known):
        found = exact_plan(spec)
        assert found.closed_form is None
        assert found.simulation.peak_bytes > found.simulation.static_bytes


def test_a_simulation_leaves_the_config_it_reads_as_it_is() -> None:
    """A changed one would be kept under another name than that under which a plan looks for it."""
    spec = resolve("80gb", "lora", ["model.id=Qwen/Qwen3-VL-2B-Instruct"]).spec
    before = simulation_key(spec)
    on_meta(spec, SimulatedDevice.of(spec.profile.device))
    assert simulation_key(spec) == before


def test_what_only_the_model_can_refuse_is_refused_by_plan(shallow: Path) -> None:
    sets = ("method.kind=lora", 'method.targets=["q_prj"]')
    spec = resolve("demo", "demo", [f"model.id={shallow}", *sets]).spec
    keep_simulation(spec, simulation(spec))
    found = invoke("plan", shallow, *sets)
    assert isinstance(found.exception, UsageError)
    assert "q_prj" in str(found.exception)


def test_a_run_on_several_devices_is_not_simulated_and_learns_what_fits(shallow: Path) -> None:
    spec: RunSpec = run_spec(shallow, device={"kind": "cuda", "memory_gib": 8.0, "count": 2})
    settled = settle_parallel(spec).spec
    assert settled.profile.parallel.strategy == "sharded"
    assert micro_batch_cost(settled, SequenceBounds(64)).plan is None
