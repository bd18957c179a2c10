"""Plans, verdicts and advice, and the two commands that print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.architecture.lookup import find_architecture, find_config
from engine.batching.predicted_cost import micro_batch_cost
from engine.budget.advise.levers import lever_of
from engine.budget.advise.plan import make_plan
from engine.budget.advise.search import advise
from engine.budget.predict.prediction import Predictor, cost_model, predict
from engine.cli import app
from engine.commands import plan_text
from engine.config.changes import with_changes
from engine.config.files.caches import SequenceBounds, lengths_record, record_longest
from engine.errors import EnvironmentProblem, UsageError
from tests.budget.metered_step import run_spec


def card(memory_gib: float) -> dict[str, Any]:
    """The profile's device table of a CUDA card with this much memory."""
    return {"kind": "cuda", "memory_gib": memory_gib, "compute_capability": 8.9}


def test_auto_takes_the_largest_micro_batch_that_fits() -> None:
    train = {"batch_size": 64, "gradient_checkpointing": True}
    spec = run_spec("Qwen/Qwen2.5-7B", card(24.0), train=train, data={"max_length": 1024})
    plan = make_plan(spec)
    arch = find_architecture(spec)
    assert plan.verdict == "fits"
    assert predict(arch, spec, rows=plan.micro_batch, length=1024).device_bytes <= plan.capacity_bytes
    assert predict(arch, spec, rows=plan.micro_batch + 1, length=1024).device_bytes > plan.capacity_bytes
    assert plan.accumulation * plan.micro_batch >= 64 > (plan.accumulation - 1) * plan.micro_batch


def test_a_batch_that_fits_whole_is_planned_whole_though_a_part_of_it_would_have_to_hold_gradients() -> None:
    train = {"batch_size": 16, "gradient_checkpointing": True}
    spec = run_spec("Qwen/Qwen2.5-7B", card(80.0), method={"kind": "full"}, train=train)
    arch = find_architecture(spec)
    whole, part = (predict(arch, spec, rows=rows, length=2048).device_bytes for rows in (16, 15))
    assert whole < part
    fitted = run_spec("Qwen/Qwen2.5-7B", card(whole / 2**30 + 0.1), method={"kind": "full"}, train=train)
    assert (make_plan(fitted).verdict, make_plan(fitted).micro_batch) == ("fits", 16)


def test_a_fixed_micro_batch_that_is_too_large_fits_smaller_and_names_the_remedy() -> None:
    train = {"batch_size": 64, "gradient_checkpointing": True}
    spec = run_spec("Qwen/Qwen2.5-7B", card(24.0), train={**train, "micro_batch": 64}, data={"max_length": 1024})
    plan = make_plan(spec)
    assert plan.verdict == "fits_smaller"
    assert plan.micro_batch == 64
    assert plan.remedies == {
        "train.micro_batch": make_plan(
            run_spec("Qwen/Qwen2.5-7B", card(24.0), train=train, data={"max_length": 1024})
        ).micro_batch
    }


def test_remedies_never_raise_the_micro_batch_of_the_recipe() -> None:
    wanting = {"batch_size": 64, "micro_batch": 2, "gradient_checkpointing": False}
    plan = make_plan(run_spec("Qwen/Qwen2.5-7B", card(24.0), train=wanting))
    assert plan.verdict == "fits_smaller"
    assert plan.remedies == {"train.gradient_checkpointing": True, "train.micro_batch": 2}


def test_what_no_remedy_can_fit_does_not_fit() -> None:
    plan = make_plan(run_spec("Qwen/Qwen2.5-72B", card(24.0)))
    assert plan.verdict == "does_not_fit"
    assert plan.margin_bytes < 0


def test_a_plan_says_whose_adafactor_it_plans() -> None:
    said = [
        " ".join(plan_text.summary_lines(make_plan(spec), spec))
        for spec in (run_spec(train={"optimizer": name}) for name in ("adafactor", "adamw"))
    ]
    assert ["adafactor is torch's" in text for text in said] == [True, False]


def test_a_plan_is_for_the_lengths_of_the_data_once_they_were_read_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n')
    source = {"name": "rows", "path": str(file)}
    spec = run_spec(data={"max_length": 2048, "sources": [source]})
    unknown = make_plan(spec)
    assert (unknown.basis, unknown.length) == ("max_length", 2048)
    record_longest(lengths_record(spec.recipe), 300)
    known = make_plan(spec)
    assert (known.basis, known.length) == ("data", 300)
    assert known.as_json() == make_plan(spec, known=SequenceBounds(300)).as_json(), (
        "what the engine plans once it has read them"
    )
    assert "300 tokens is the longest sequence in the data" in plan_text.summary_lines(known, spec)
    assert advise(spec).plan.length == 300
    other = run_spec(data={"max_length": 1024, "sources": [source]})
    assert make_plan(other).length == 1024, "truncation may differ, so the lengths are unknown"
    file.write_text('{"text": "longer"}\n')
    assert make_plan(spec).basis == "max_length", "the file has changed"


@pytest.mark.parametrize("asked", ["auto", 3])
def test_a_micro_batch_of_pairs_is_planned_with_as_many_sequences_as_a_run_holds(asked: str | int) -> None:
    """Both sides of the longest pair, or one sequence where two do not fit."""
    preferences: dict[str, Any] = {
        "method": {"kind": "full", "objective": "dpo"},
        "data": {"max_length": 512},
        "train": {"micro_batch": asked, "batch_size": 4, "gradient_checkpointing": False},
    }
    roomy = run_spec(**preferences)
    predictor = Predictor(find_architecture(roomy), roomy)
    planned = {}
    for rows in (1, 2, 3, 5):
        gib = (predictor.predict(rows, 512).device_bytes + 4096) / 2**30
        spec = run_spec(device={"kind": "metered", "memory_gib": gib}, **preferences)
        plan = make_plan(spec)
        planned[rows] = plan.micro_batch if plan.verdict == "fits" else plan.remedies["train.micro_batch"]
        budget = micro_batch_cost(spec, SequenceBounds(512)).budget
        assert budget.budget_bytes == cost_model(predictor.arch, spec).bytes(plan.micro_batch, 512)
    assert planned == {1: 1, 2: 2, 3: 2, 5: 4 if asked == "auto" else 2}


def test_a_plan_counts_as_many_target_tokens_as_the_data_have_and_says_how_many(tmp_path: Path) -> None:
    """Held-out sequences count too, as evaluations run in the same micro-batches."""
    for name in ("pairs", "others"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    source, other = ({"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("pairs", "others"))
    preferences: dict[str, Any] = {"method": {"objective": "dpo"}, "data": {"max_length": 2048, "sources": [source]}}
    spec = run_spec(**preferences)
    assert make_plan(spec).target_tokens == 2048
    record_longest(lengths_record(spec.recipe), 300, targets=40)
    known = make_plan(spec)
    assert (known.as_json()["length"], known.as_json()["target_tokens"]) == (300, 40)
    assert known.peak_bytes < make_plan(spec, known=SequenceBounds(300)).peak_bytes
    assert advise(spec).plan == known
    said = "300 tokens is the longest sequence in the data; a sample has at most 40 target tokens"
    assert said in plan_text.summary_lines(known, spec)
    preferences["data"]["validation"] = [other]
    held_out = run_spec(**preferences)
    assert make_plan(held_out).target_tokens == 300, "the held-out data were not read"
    record_longest(lengths_record(held_out.recipe, validation=True), 200, targets=90)
    assert make_plan(held_out).target_tokens == 90


def test_a_plan_says_what_generating_adds() -> None:
    held_out: dict[str, Any] = {"data": {"max_length": 64, "valid_fraction": 0.1}}
    few, many = (
        make_plan(run_spec(**held_out, eval={"samples": n}, generate={"max_new_tokens": 64 * n})) for n in (1, 64)
    )
    assert few.generate_adds_bytes == 0
    row = sum(many.prediction.phases["generate"].values())
    steps = max(sum(parts.values()) for name, parts in many.prediction.phases.items() if name != "generate")
    assert many.generate_adds_bytes == row - steps > 0


def test_json_has_the_agreed_keys() -> None:
    document = make_plan(run_spec(method={"kind": "full"})).as_json()
    assert document["learning_rate"] == 2e-5
    assert {
        "verdict",
        "capacity_bytes",
        "peak_bytes",
        "deciding_phase",
        "components",
        "phases",
        "micro_batch",
        "accumulation",
        "tokens_per_micro_batch",
    } <= set(document)
    json.dumps(document)


@pytest.mark.parametrize(
    ("model", "memory_gib", "tables"),
    [
        ("Qwen/Qwen2.5-7B", 24.0, {"method": {"kind": "full"}}),
        ("Qwen/Qwen2.5-14B", 24.0, {}),
        ("Qwen/Qwen2.5-7B", 18.0, {"data": {"max_length": 16384}}),
        ("meta-llama/Llama-3.1-8B", 24.0, {"train": {"gradient_checkpointing": False, "micro_batch": 8}}),
        ("meta-llama/Llama-3.2-3B", 24.0, {"method": {"kind": "full"}}),
        ("Qwen/Qwen2.5-7B", 18.0, {"method": {"kind": "full", "train_only": ["**.self_attn"]}}),
    ],
)
def test_every_suggestion_fits_and_the_learning_changing_ones_come_last(
    model: str, memory_gib: float, tables: dict[str, Any]
) -> None:
    advice = advise(run_spec(model, card(memory_gib), **tables))
    assert advice.plan.verdict != "fits"
    assert advice.suggestions
    assert all(suggestion.plan.verdict == "fits" for suggestion in advice.suggestions)
    marks = [suggestion.changes_learning for suggestion in advice.suggestions]
    assert marks == sorted(marks)


def test_room_left_is_offered_only_where_it_fits() -> None:
    advice = advise(run_spec())
    assert advice.plan.verdict == "fits"
    assert not advice.suggestions
    assert advice.room
    assert all(suggestion.plan.verdict == "fits" for suggestion in advice.room)


def test_longer_sequences_are_offered_only_where_some_are_cut_and_auto_only_where_it_changes_something(
    tmp_path: Path,
) -> None:
    """Regression: "longer samples are kept" where none was dropped, and "5 % faster" for the same micro-batch."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n')
    spec = run_spec(data={"max_length": 64, "sources": [{"name": "rows", "path": str(file)}]}, train={"batch_size": 8})

    def offered(**changes: Any) -> set[str]:
        return {key for suggestion in advise(with_changes(spec, changes)).room for key in suggestion.changes}

    largest = make_plan(spec).micro_batch
    assert "train.micro_batch" not in offered(**{"train.micro_batch": largest})
    assert "train.micro_batch" in offered(**{"train.micro_batch": largest - 1})
    assert "data.max_length" in offered()
    record_longest(lengths_record(spec.recipe), 41, keeps_all=True)
    assert "data.max_length" not in offered()


def test_an_unknown_architecture_is_refused_with_what_is_known() -> None:
    from engine.architecture.facts import from_config

    with pytest.raises(UsageError, match="mamba"):
        from_config({"model_type": "mamba"})


def test_a_model_that_is_nowhere_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(EnvironmentProblem) as caught:
        find_config("nobody/nothing")
    assert "hf download nobody/nothing" in caught.value.fix


def test_a_cached_model_is_read_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123\n")
    (repository / "snapshots" / "abc123").mkdir(parents=True)
    (repository / "snapshots" / "abc123" / "config.json").write_text('{"model_type": "qwen2"}')
    assert find_config("some/model") == {"model_type": "qwen2"}


def invoke(*arguments: str) -> Any:
    """Run the command line in this process; returns its result."""
    return CliRunner().invoke(app, list(arguments))


def test_plan_prints_the_table_and_calls_a_metered_device_simulated() -> None:
    result = invoke("plan", "-p", "demo", "-r", "demo")
    assert result.exit_code == 0
    assert "simulated" in result.stdout
    assert "layer_first" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


@pytest.mark.parametrize("profile", ["24gb", "4xh100"])
@pytest.mark.parametrize("recipe", ["lora", "full"])
def test_every_line_of_a_plan_is_within_80_columns_and_in_one_unit(profile: str, recipe: str) -> None:
    result = invoke("plan", "-p", profile, "-r", recipe, "--set", "model.id=meta-llama/Llama-3.1-8B")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "MiB" not in result.stdout and "GiB" in result.stdout
    assert ("on each of 4 devices" in result.stdout) == (profile == "4xh100")


@pytest.mark.parametrize(
    ("recipe", "sets", "lever"),
    [
        ("full", ["train.micro_batch=1", "data.max_length=256"], "adamw_8bit"),
        ("full", ["train.micro_batch=1", "data.max_length=256", "train.optimizer_offload=true"], 'kind = "lora"'),
        ("lora", ["train.gradient_checkpointing=false"], "train.gradient_checkpointing = true"),
        (
            "lora",
            ["train.loss=plain", "train.micro_batch=2", "data.max_length=512", "train.gradient_checkpointing=true"],
            'train.loss = "auto"',
        ),
        ("lora", ["train.micro_batch=4"], "train.micro_batch below 4"),
        ("lora", ["train.micro_batch=1"], "data.max_length below 2048"),
    ],
)
def test_a_plan_names_the_phase_that_decides_and_the_lever_that_moves_it(
    recipe: str, sets: list[str], lever: str
) -> None:
    flags = [flag for change in ["model.id=Qwen/Qwen2.5-1.5B", *sets] for flag in ("--set", change)]
    decides = next(line for line in shown(recipe, flags) if "(*); to lower it" in line)
    assert lever in decides


def shown(recipe: str, flags: list[str]) -> list[str]:
    """The lines that `tunedeck plan` prints for this recipe on the profile 80gb, on a terminal of 200 columns."""
    result = CliRunner().invoke(app, ["plan", "-p", "80gb", "-r", recipe, *flags], env={"COLUMNS": "200"})
    return str(result.stdout).splitlines()


def test_the_lever_that_a_plan_names_lowers_its_peak() -> None:
    sets = {"train": {"micro_batch": 4, "gradient_checkpointing": False}, "data": {"max_length": 1024}}
    spec = run_spec("Qwen/Qwen2.5-1.5B", card(80.0), **sets)
    assert lever_of(make_plan(spec), spec) == "train.gradient_checkpointing = true"
    sets["train"]["gradient_checkpointing"] = True
    checked = run_spec("Qwen/Qwen2.5-1.5B", card(80.0), **sets)
    assert make_plan(checked).peak_bytes < make_plan(spec).peak_bytes
    assert lever_of(make_plan(checked), checked) == "train.micro_batch below 4"


def test_plan_json_is_one_document() -> None:
    assert json.loads(invoke("plan", "-p", "demo", "-r", "demo", "--json").stdout)["verdict"] == "fits_smaller"


def test_plan_exits_with_3_when_it_does_not_fit() -> None:
    result = invoke("plan", "-p", "24gb", "-r", "full", "--set", "model.id=Qwen/Qwen2.5-72B")
    assert result.exit_code == 3
    assert "does not fit" in result.stdout


def test_the_exact_plan_agrees_with_the_closed_form() -> None:
    document = json.loads(invoke("plan", "-p", "demo", "-r", "demo", "--exact", "--json").stdout)
    assert document["exact"] and document["verdict"] == "fits_smaller"
    assert document["closed_form_bytes"] == pytest.approx(document["peak_bytes"], rel=0.005)


def test_fit_writes_a_recipe_that_fits(tmp_path: Path) -> None:
    target = tmp_path / "smaller.toml"
    sets = ["--set", "model.id=Qwen/Qwen2.5-7B"]
    assert json.loads(invoke("plan", "-p", "24gb", "-r", "full", *sets, "--json").stdout)["verdict"] == "does_not_fit"
    result = invoke("advise", "-p", "24gb", "-r", "full", *sets, "--write", str(target))
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("plan", "-p", "24gb", "-r", str(target), "--json").stdout)["verdict"] == "fits"
    assert "# " in target.read_text()


def test_smaller_images_are_advice_that_changes_what_is_learned() -> None:
    data = {"sources": [{"name": "main", "path": "x.jsonl", "format": "image-chat"}], "max_length": 8192}
    train = {"gradient_checkpointing": True, "activation_offload": True, "batch_size": 4, "micro_batch": 1}
    method = {"rank": 4, "targets": ["**.blocks.*.attn.*"], "adapter_dtype": "bfloat16"}
    tables: dict[str, Any] = {
        "data": {**data, "image_max_pixels": 8000 * 28 * 28}, "train": train, "method": method,
        "model": {"dtype": "bfloat16"},
    }  # fmt: skip
    roomy = make_plan(run_spec("Qwen/Qwen2.5-VL-3B-Instruct", card(80.0), **tables))
    tight = card(0.99 * roomy.prediction.device_bytes / 2**30)
    advice = advise(run_spec("Qwen/Qwen2.5-VL-3B-Instruct", tight, **tables))
    assert advice.plan.verdict != "fits"
    smaller = [one for one in advice.suggestions if "data.image_max_pixels" in one.changes]
    assert smaller and all(one.changes_learning and one.plan.verdict == "fits" for one in smaller)
    before, after = smaller[0].changes["data.image_max_pixels"]
    assert after <= before // 2
