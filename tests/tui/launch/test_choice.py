"""Choices of the Launch screen, their evaluation and the changes of them, without a screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.budget.advise.plan import Plan
from engine.checks import machine
from engine.config.files.caches import lengths_record, record_longest
from engine.config.files.find import KIND_FOLDERS, SHIPPED_FOLDER
from engine.config.files.machine import install_packages
from engine.config.schema.run import Device, Profile, RunSpec
from tui.files.catalog import FileEntry, Machine, mismatch, profile_entries, write_detected_profile
from tui.launch.budget_bar import next_step, verdict_line
from tui.launch.choice import (
    Choice,
    choice_from_settings,
    shell_lines,
    train_command,
)
from tui.launch.evaluate import evaluate_choice
from tui.launch.fields import FIELDS, NAME, OTHER, PROFILE, RECIPE, allowed_values, field_help, field_rows, format_value
from tui.launch.file_rows import recipe_row
from tui.launch.lengths import basis_words, change_words
from tui.launch.state import LaunchState

CPU = Machine(Device(kind="cpu", memory_gib=16.0), 1, "This machine's CPU, 2 cores", "")
H100 = Machine(Device(kind="cuda", memory_gib=79.64, compute_capability=9.0), 1, "NVIDIA H100 80GB HBM3", "")
DEMO = Choice("demo", "demo")


def spec_of(choice: Choice) -> tuple[RunSpec, Plan]:
    evaluated = evaluate_choice(choice)
    assert evaluated.spec is not None and evaluated.plan is not None, evaluated.problems
    return evaluated.spec, evaluated.plan


def problem(choice: Choice, row: str) -> str:
    return evaluate_choice(choice).problem_of(row)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("train.batch_size", "abc", "an integer, 1 or more is allowed"),
        ("train.batch_size", "0", "1 or more"),
        ("train.learning_rate", "-1", "above 0"),
        ("method.kind", "qlora", "nf4"),
        ("train.batch_sise", "8", "did you mean train.batch_size?"),
        ("data.sources.main.path", "x", 'no entry named "main"'),
        ("trackers.use", '["wandb"]', f"wandb is not installed; {install_packages('wandb')}"),
        ("model.id", "./nowhere", "does not exist"),
    ],
)
def test_what_is_wrong_stands_beside_the_row_it_was_typed_in(
    key: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    row = "data.sources.main" if key.startswith("data.sources") else key
    assert said in problem(replace(DEMO, overrides={key: text}), row)


def test_the_list_of_recipes_says_its_verdict_in_words() -> None:
    evaluated = evaluate_choice(DEMO)
    assert evaluated.plan is not None
    smaller = replace(evaluated.plan, verdict="fits_smaller", remedies={"train.micro_batch": 4})
    entry = FileEntry("demo", "a title", "shipped", Path("demo.toml"))
    fits = replace(smaller, verdict="fits", remedies={})
    for plan, words in ((fits, "✓ fits "), (smaller, "◐ fits with micro-batch 4 ")):
        row = recipe_row(entry, replace(evaluated, plan=plan), chosen=False, name_width=6, ascii_only=False)
        assert words in row.plain and row.plain.endswith("a title")
    elsewhere = replace(entry, made_for="24gb")
    too_large = replace(evaluated, plan=replace(smaller, verdict="does_not_fit", remedies={}))
    rows = [recipe_row(each, too_large, chosen=False, name_width=6, ascii_only=False) for each in (elsewhere, entry)]
    assert "✗ made for 24gb " in rows[0].plain and "✗ does not fit " in rows[1].plain


def test_the_budget_says_which_lengths_it_is_for_where_there_is_room() -> None:
    spec, plan = spec_of(DEMO)
    assert basis_words(plan, reading=False, readable=True) == (
        "for the longest possible sequence, 64 tokens; d reads the data"
    )
    record_longest(lengths_record(spec.recipe), 41)
    _, known = spec_of(DEMO)
    assert basis_words(known, reading=False, readable=False) == "for the longest sequence in the data, 41 tokens"
    assert "has 41 tokens, not 64; predicted peak 192.2 MiB -> 126.7 MiB" in change_words(plan, known)
    assert verdict_line(known, 60, ascii_only=False).plain.startswith("◐ too big; fits with micro-batch 28 ")
    assert verdict_line(known, 60, ascii_only=True).plain.startswith("~ too big"), "% reads as a share"
    few = replace(plan, basis="data", row_targets=12)
    words = basis_words(few, reading=False, readable=False)
    assert words == "for the longest sequence in the data, 64 tokens (12 target tokens)"
    assert "data has been read: no sequence has more than 12 target tokens; predicted" in change_words(plan, few)


def test_data_that_is_not_there_is_said_before_the_engine_would_find_out(tmp_path: Path) -> None:
    choice = DEMO.with_field("data.sources.dates", str(tmp_path / "none.jsonl"))
    assert problem(choice, "data.sources.dates") == f"source dates: {tmp_path / 'none.jsonl'} does not exist"
    assert "cannot start" in str(evaluate_choice(choice).start_refusal("start"))
    assert evaluate_choice(choice).start_refusal("queue") is None


def test_devices_and_name_are_checked_like_any_field() -> None:
    assert "list of devices" in problem(replace(DEMO, devices="a,b"), "--devices")
    assert "lists 2" in problem(Choice("24gb", "lora", devices="0,1"), "--devices")
    assert "letters, digits" in problem(replace(DEMO, name="a b"), NAME)


def test_a_model_whose_config_is_not_here_starts_only_if_the_hub_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = DEMO.with_field("model.id", "nobody/knows")
    evaluated = evaluate_choice(choice)
    assert evaluated.plan is None and "nobody/knows" in evaluated.unplanned
    assert "HF_HUB_OFFLINE is set" in str(evaluated.start_refusal("start"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    evaluated = evaluate_choice(choice)
    assert evaluated.start_refusal("start") is None
    assert next_step(evaluated).startswith("s checks the hub for the model first")


def test_what_does_not_fit_is_started_only_by_force() -> None:
    evaluated = evaluate_choice(DEMO.with_field("device.memory_gib", "0.001"))
    assert "does not fit" in str(evaluated.start_refusal("start"))
    assert evaluated.start_refusal("force") is None
    assert evaluate_choice(DEMO).start_refusal("force") == "nothing to force: s starts it"


@pytest.mark.parametrize(
    ("batch", "micro", "formula"),
    [(64, 16, "16 × 4 accumulated × 1 device = 64"), (64, 24, "24 × 3 accumulated × 1 device ≥ 64")],
)
def test_the_effective_batch_is_micro_times_accumulation_times_devices(batch: int, micro: int, formula: str) -> None:
    choice = DEMO.with_field("train.batch_size", str(batch)).with_field("train.micro_batch", str(micro))
    split = evaluate_choice(choice).batch_split
    assert split is not None and split.formula == formula


def test_the_command_repeats_the_choice_word_for_word() -> None:
    choice = DEMO.with_field("train.batch_size", "32").with_field("model.id", "my model")
    choice = choice.with_field("--on-finish", "echo $TUNEDECK_STATUS")
    words = train_command(replace(choice, devices="0", name="n"), runs="there")
    assert words == [
        "tunedeck", "train", "-p", "demo", "-r", "demo", "--set", "train.batch_size=32", "--set", "model.id=my model",
        "--devices", "0", "--name", "n", "--on-finish", "echo $TUNEDECK_STATUS", "--runs", "there", "--detach",
    ]  # fmt: skip
    spec = evaluate_choice(DEMO.with_field("--on-finish", "true")).spec
    assert spec is not None and spec.limits.on_finish == "true"
    assert shell_lines(words)[2] == "  --set 'model.id=my model' \\"


def test_a_run_is_cloned_with_its_overrides_and_its_own_shipped_files() -> None:
    settings = {"profile": "shipped:demo", "recipe": "demo", "overrides": ["train.seed=7", "data.max_length=48"]}
    choice = choice_from_settings(settings, Choice("", ""))
    assert choice.profile == str(SHIPPED_FOLDER / KIND_FOLDERS["profile"] / "demo.toml")
    assert choice.overrides == {"train.seed": "7", "data.max_length": "48"}
    spec, _ = spec_of(choice)
    assert (spec.recipe.train.seed, spec.recipe.data.max_length) == (7, 48)


def test_every_field_has_words_about_it_and_its_choices_are_accepted() -> None:
    spec, _ = spec_of(Choice("24gb", "lora"))
    for row in field_rows(spec, {}, {}, Path.cwd()):
        assert field_help(row.key).strip(" :"), row.key
        for text in allowed_values(row.key):
            assert "is allowed" not in problem(Choice("24gb", "lora", {row.key: text}), row.key)
    assert len({field.key for field in FIELDS}) == len(FIELDS)


def test_a_key_without_a_row_gets_one_while_something_is_wrong_with_it_or_it_was_set() -> None:
    spec, _ = spec_of(DEMO)
    keys = [row.key for row in field_rows(spec, {"train.eps": "1e-7"}, {}, Path.cwd(), ["model.revision"])]
    assert {"train.eps", "model.revision"} <= set(keys) and keys[-1] == OTHER


@pytest.mark.parametrize(
    ("device", "machine", "said"),
    [
        (Device(kind="cuda", memory_gib=24.0), CPU, "this machine has no CUDA device"),
        (Device(kind="cuda", memory_gib=140.4), H100, "has 79.6 GiB, not 140.4"),
        (Device(kind="cuda", memory_gib=79.0, count=4), H100, "this machine has 1 GPU, not 4"),
        (Device(kind="cuda", memory_gib=79.0, compute_capability=10.0), H100, "has compute capability 9.0, not 10.0"),
        (Device(kind="cuda", memory_gib=23.0), H100, ""),
        (Device(kind="metered", memory_gib=900.0), CPU, ""),
    ],
)
def test_a_profile_says_why_it_is_not_this_machine(device: Device, machine: Machine, said: str) -> None:
    found = mismatch(Profile.model_validate({"name": "x", "device": device}), machine)
    assert said in found and bool(said) == bool(found)


def test_this_machine_comes_first_under_the_name_of_a_profile_that_describes_it() -> None:
    first = profile_entries(H100)[0]
    assert (first.argument, first.is_this_machine) == ("80gb", True)


def test_a_machine_no_profile_describes_gets_one_that_can_be_used() -> None:
    first = profile_entries(CPU)[0]
    assert first.is_this_machine and first.origin == "detected"
    assert write_detected_profile(CPU) == ""
    assert "tunedeck profiles check" not in first.path.read_text(), "no command finds it by a name"
    spec, _ = spec_of(Choice(first.argument, "demo"))
    assert spec.profile.device.memory_gib == 16.0


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchState:
    """The Launch screen's state with the demo chosen, in a project folder of its own."""
    monkeypatch.chdir(tmp_path)
    made = LaunchState(CPU)
    made.begin({"profile": "demo", "recipe": "demo"})
    return made


def test_typing_what_the_file_says_is_no_change(launch: LaunchState) -> None:
    launch.set_field("train.batch_size", "6")
    launch.set_field("train.batch_size", "64")
    assert launch.choice == DEMO


def test_the_last_valid_plan_stays_until_another_recipe_is_chosen(launch: LaunchState) -> None:
    plan = launch.snapshot().last_valid.plan
    launch.set_field("train.batch_size", "6x")
    assert launch.evaluated.plan is None and launch.snapshot().last_valid.plan is plan
    launch.change(Choice("demo", "qlora"))
    assert launch.snapshot().last_valid.plan is None
    assert [row.key for row in launch.field_rows()] == [PROFILE, RECIPE, "model.quantize", OTHER]


def test_applied_advice_makes_it_fit_and_can_be_taken_back(launch: LaunchState) -> None:
    advice = launch.advice(compute=True)
    assert advice is not None and advice.plan.verdict == "fits_smaller"
    launch.apply(advice.suggestions[0])
    assert launch.evaluated.plan is not None and launch.evaluated.plan.verdict == "fits"
    launch.undo()
    assert launch.choice == DEMO


def test_advice_is_computed_anew_when_launch_is_opened_again(launch: LaunchState) -> None:
    """Regression: after a run had taught the pace, the fixes kept what they cost before it."""
    assert launch.advice(compute=True) is not None
    launch.begin()
    assert launch.advice() is None
    assert launch.advice(compute=True) is not None


def test_a_changed_recipe_is_saved_with_its_comments_and_becomes_the_choice(launch: LaunchState) -> None:
    launch.change(Choice("24gb", "lora", {"train.batch_size": "8", "device.reserve_gib": "2.0"}))
    assert launch.changed_kinds == ["recipe", "profile"]
    path = launch.save("recipe", launch.unused_name("recipe"))
    assert path == Path("profiles/recipes/lora-2.toml").absolute()
    text = path.read_text()
    assert "batch_size = 8" in text and "# Your data:" in text
    assert (launch.choice.recipe, dict(launch.choice.overrides)) == ("lora-2", {"device.reserve_gib": "2.0"})
    launch.save("profile", "mine")
    assert (launch.choice.profile, dict(launch.choice.overrides)) == ("mine", {})
    spec, _ = spec_of(launch.choice)
    assert (spec.recipe.train.batch_size, spec.profile.device.reserve_gib) == (8, 2.0)


def test_every_recipe_gets_its_verdict_on_the_chosen_profile(launch: LaunchState) -> None:
    while launch.compute_next_verdict():
        pass
    verdicts = {name: evaluated.plan and evaluated.plan.verdict for name, evaluated in launch.verdicts.items()}
    assert (verdicts["demo"], verdicts["full"], verdicts["qlora"]) == ("fits_smaller", "does_not_fit", None)
    launch.change(replace(launch.choice, profile="80gb"))
    assert launch.verdicts == {}


def test_a_profile_of_another_machine_is_planned_for_but_not_started(launch: LaunchState) -> None:
    launch.change(replace(launch.choice, profile="24gb"))
    assert launch.evaluated.plan is not None
    assert "no CUDA device" in str(launch.evaluated.start_refusal("start"))


def test_a_name_that_no_file_has_is_said_with_the_names_there_are() -> None:
    evaluated = evaluate_choice(Choice("nope", "demo"))
    assert evaluated.spec is None and "no profile named" in evaluated.problems[0].text


def test_a_staged_recipe_shows_the_stage_with_the_least_memory_left(tmp_path: Path) -> None:
    stages = '[[stages]]\nname = "small"\ntrain = { batch_size = 1, micro_batch = 1 }\n[[stages]]\nname = "large"\n'
    shipped = (SHIPPED_FOLDER / KIND_FOLDERS["recipe"] / "demo.toml").read_text()
    (tmp_path / "staged.toml").write_text(shipped.replace('name = "demo"', 'name = "staged"', 1) + stages)
    evaluated = evaluate_choice(Choice("demo", str(tmp_path / "staged.toml")))
    assert evaluated.planned is not None and evaluated.planned.name == "staged/large", evaluated.problems
    assert evaluated.plan is not None and evaluated.plan.verdict == "fits_smaller"
    assert evaluated.notices[0] == "2 stages; the bar shows large, which has the least memory left"
    assert [stage.text.partition(",")[0] for stage in evaluated.stages] == ["fits", "fits with micro-batch 17"]


def test_a_step_on_pairs_is_told_in_pairs(tmp_path: Path) -> None:
    """Two sequences a pair, so 4 sequences at a time are 3 micro-batches for 5 pairs."""
    recipe = tmp_path / "pairs.toml"
    recipe.write_text(
        'model = { id = "builtin:tiny", tokenizer = "builtin:bytes", init = "random" }\n'
        'method = { kind = "full", objective = "dpo" }\ntrain = { batch_size = 5, micro_batch = 4 }\n'
        'data = { max_length = 64, sources = [{ name = "pairs", path = "pairs.jsonl" }] }\n'
    )
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 5)
    split = evaluate_choice(Choice("demo", str(recipe))).batch_split
    assert split is not None and split.formula == "4 × 3 accumulated × 1 device ≥ 10, 5 pairs"
    assert split.sentence == "micro-batch 4, 3 of them for a step of 5 of the longest pairs"


def test_a_list_is_shown_as_it_is_written_in_a_recipe() -> None:
    assert format_value(["tensorboard", "wandb"]) == '["tensorboard", "wandb"]'
