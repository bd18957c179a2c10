"""Public tasks: the figures of lm-evaluation-harness's own model on the same weights, resume after a kill, refusals.

Needs lm-eval: `pip install lm-eval==0.4.13`, beside the packages of constraints.txt in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.errors import DataError, EnvironmentProblem, MemoryExhaustedError, UsageError
from engine.model.load import load_model
from engine.model.tokenizer import load_tokenizer
from tests.budget.metered_step import GPT2, LLAMA, folder_of, run_spec

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from engine.extras.harness import harness, task_sandbox

ROOT = Path(__file__).resolve().parents[2]

CHOICE = """task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: FOLDER/choice.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
num_fewshot: 1
fewshot_split: train
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 2.0}
"""
ROLLING = """task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: FOLDER/rolling.jsonl}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GENERATE = """task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: FOLDER/generate.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", "zz"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
filter_list:
  - {name: letters, filter: [{function: regex, regex_pattern: "([^ ]+)"}, {function: take_first}]}
  - {name: strict, filter: [{function: take_first}]}
"""
MEMORY = (8.0, 64.0)
"""MiB in which a request of a few tokens fits and the longest text does not, and in which all fit."""
TASKS = ["tiny_choice", "tiny_rolling", "tiny_generate"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice, a rolling-perplexity and a generation task."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    rows: dict[str, list[dict[str, Any]]] = {
        "choice": [{"question": f"Number {n}: ", "choices": [f"a{n}", f"b{n} long", "c"], "answer": n % 3}
                   for n in range(7)],
        "rolling": [{"text": f"Text {n} " + "with some words and é " * (1 + 4 * n)} for n in range(5)],
        "generate": [{"question": f"Say {n} {'and ' * n}", "answer": "x"} for n in range(6)],
    }  # fmt: skip
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def spec_of(config: dict[str, Any], folder: Path, tasks: Path, template: str = "off") -> RunSpec:
    model = {"dtype": "float32", "tokenizer": "builtin:bytes"}
    spec = run_spec(folder_of(config, folder), {"kind": "cpu", "memory_gib": 8.0}, model=model, method={"kind": "full"})
    asked = spec.recipe.evaluate.model_copy(
        update={"harness": TASKS, "harness_include": str(tasks), "harness_template": template}
    )
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"evaluate": asked})})


def own_figures(spec: RunSpec, *, template: bool) -> dict[str, dict[str, Any]]:
    """lm-evaluation-harness's results with its own model on our weights."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    device = open_device(spec)
    with device.activate():
        loaded = load_model(spec, device, load_tokenizer(spec.recipe.model))
        model = HFLM(pretrained=loaded.base.eval(), tokenizer=loaded.tokenizer, batch_size=3)
        found = simple_evaluate(
            model=model, tasks=TASKS, task_manager=harness.load_tasks(TASKS, spec.recipe.evaluate.harness_include),
            apply_chat_template=template, bootstrap_iters=0,
        )  # fmt: skip
    results: dict[str, dict[str, Any]] = found["results"]
    return results


@pytest.mark.parametrize(("config", "template"), [(LLAMA, False), (GPT2, False), (LLAMA, True)])
def test_figures_are_those_of_its_own_model(
    config: dict[str, Any], template: bool, tmp_path: Path, tasks: Path
) -> None:
    spec = spec_of(config, tmp_path, tasks, "on" if template else "off")
    ours = {task.task: task for task in harness.score_model_on_tasks(spec, lambda text: None).tasks}
    theirs = own_figures(spec, template=template)
    compared = 0
    for task in TASKS:
        for key, value in theirs[task].items():
            metric, _, filtered = key.partition(",")
            if isinstance(value, float | int) and filtered and "stderr" not in metric:
                name = f"{task}/{metric}" + (f"/{filtered}" if filtered != "none" else "")
                assert ours[task].metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
                compared += 1
    assert compared == 7
    assert "version 2.0, 1 shots" in ours["tiny_choice"].notes[0]
    assert len(ours["tiny_choice"].values["tiny_choice/acc"]) == ours["tiny_choice"].count == 7


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.evaluate.test_harness import evaluated, spec_of
from tests.budget.metered_step import LLAMA
def kill(text):
    if "requests" in text:
        os.kill(os.getpid(), signal.SIGKILL)
evaluated(spec_of(LLAMA, Path(sys.argv[1]), Path(sys.argv[2])), Path(sys.argv[3]), kill)
"""


def evaluated(spec: RunSpec, kept: Path, notify: Any) -> list[harness.TaskScores]:
    device = open_device(spec)
    with device.activate():
        loaded = load_model(spec, device, load_tokenizer(spec.recipe.model))
        manager = harness.load_tasks(TASKS, spec.recipe.evaluate.harness_include)
        return harness.evaluate_tasks(spec, loaded, manager, kept, "weights", notify)


def test_a_kill_in_the_middle_goes_on(tmp_path: Path, tasks: Path) -> None:
    kept, spec = tmp_path / "kept.jsonl", spec_of(LLAMA, tmp_path, tasks)
    killed = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(tmp_path), str(tasks), str(kept)], check=False,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    before = len(kept.read_text().splitlines())
    assert before > 0
    said: list[str] = []
    resumed = evaluated(spec, kept, said.append)
    rest = len(kept.read_text().splitlines()) - before
    assert 0 < rest == sum(int(text.split()[0]) for text in said if "requests" in text)
    assert resumed == evaluated(spec, tmp_path / "other.jsonl", said.append)
    assert evaluated(spec, kept, said.append) == resumed


def test_what_was_forgotten_is_marked() -> None:
    def result(step: int, values: list[float]) -> harness.HarnessResult:
        mean = sum(values) / len(values)
        task = harness.TaskScores("t", {"t/acc": mean, "t/word_perplexity": mean}, {"t/acc": values}, len(values), "d")
        return harness.HarnessResult(step, [task])

    acc, perplexity = harness.changes(result(0, [1.0] * 40), result(5, [1.0] * 20 + [0.0] * 20))
    assert acc.forgot and acc.gain == -0.5 and perplexity.gain == 0.5 and not perplexity.forgot
    chance, _ = harness.changes(result(0, [1.0] * 40), result(5, [1.0] * 39 + [0.0]))
    assert chance.gain < 0 and not chance.forgot


def test_unknown_tasks_and_data_that_cannot_be_had_are_refused(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="tiny_chois"):
        harness.load_tasks(["tiny_chois"], str(tasks))
    with pytest.raises(UsageError, match="no such folder"):
        harness.load_tasks(["tiny_choice"], str(tmp_path / "nowhere"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentProblem, match="gsm8k") as refused:
        harness.load_tasks(["gsm8k"], None)
    assert refused.value.exit_code == 6


def test_a_run_on_plain_text_is_asked_without_the_template() -> None:
    asked = run_spec().recipe.evaluate
    used = {plain: harness.task_options(asked, has_template=True, plain=plain)["apply_chat_template"]
            for plain in (True, False)}  # fmt: skip
    assert used == {True: False, False: True}
    with pytest.raises(UsageError, match="no chat template"):
        harness.task_options(asked.model_copy(update={"harness_template": "on"}), has_template=False)


def test_a_task_that_is_not_known_is_found_in_the_folder_that_the_fix_asks_for(tasks: Path) -> None:
    with pytest.raises(UsageError) as refused:
        harness.load_tasks(["tiny_choice"], None)
    assert refused.value.fix == "for your own tasks: --include-path DIR"
    assert "tiny_choice" in harness.load_tasks(["tiny_choice"], str(tasks)).all_tasks


def asked(spec: RunSpec, **keys: Any) -> RunSpec:
    """The run spec with other keys of [evaluate]."""
    evaluate = spec.recipe.evaluate.model_copy(update=keys)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"evaluate": evaluate})})


def with_memory(spec: RunSpec, mib: float) -> RunSpec:
    device = spec.profile.device.model_copy(update={"kind": "metered", "memory_gib": mib / 1024})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device})})


def test_a_request_that_does_not_fit_does_with_more_memory_or_without_its_task(tmp_path: Path, tasks: Path) -> None:
    spec = spec_of(LLAMA, tmp_path, tasks)
    tight, roomy = MEMORY
    with pytest.raises(MemoryExhaustedError, match="loglikelihood of one request") as refused:
        harness.score_model_on_tasks(with_memory(asked(spec, harness=["tiny_rolling"]), tight), lambda text: None)
    assert refused.value.fix == "use a profile with more memory, or leave the task out"
    for mib, names in ((roomy, ["tiny_choice", "tiny_rolling"]), (tight, ["tiny_choice"])):
        found = harness.score_model_on_tasks(with_memory(asked(spec, harness=names), mib), lambda text: None)
        assert [task.task for task in found.tasks] == names


REFUSES = "{% for m in messages %}{{ raise_exception('no such role: ' + m.role) if m.role == 'system' }}{% endfor %}"


def test_messages_that_the_template_refuses_are_asked_without_it(tmp_path: Path, tasks: Path) -> None:
    spec = asked(spec_of(LLAMA, tmp_path, tasks, "on"), harness=["tiny_choice"])
    model = spec.recipe.model.model_copy(update={"chat_template": REFUSES})
    data = spec.recipe.data.model_copy(update={"system_prompt": "be brief"})
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model, "data": data})})
    with pytest.raises(DataError, match="no such role: system") as refused:
        harness.score_model_on_tasks(spec, lambda text: None)
    assert refused.value.fix == "--set evaluate.harness_template=off"
    assert harness.score_model_on_tasks(asked(spec, harness_template="off"), lambda text: None).tasks


CALLS = "{{ cycler.__init__.__globals__.os.system('touch MARK') }}"
WITHOUT_END = "{{ ('a' * 60 + 'b') | regex_replace('(a+)+c', '') }}"


@pytest.mark.parametrize("template", [CALLS, WITHOUT_END])
def test_a_template_of_a_task_calls_no_function_and_ends(
    tmp_path: Path, tasks: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_sandbox, "RENDER_CPU_SECONDS", 1.0)
    mark, folder = tmp_path / "mark", tmp_path / "own"
    folder.mkdir()
    text = GENERATE.replace("FOLDER", str(tasks)).replace('"{{question}}"', f'"{template}"').replace("MARK", str(mark))
    (folder / "evil.yaml").write_text(text.replace("tiny_generate", "evil"))
    spec = asked(spec_of(LLAMA, tmp_path, folder), harness=["evil"])
    with pytest.raises(DataError, match="a task's template is stopped"):
        harness.score_model_on_tasks(spec, lambda text: None)
    assert not mark.exists()


ENDLESS = "(?:|){60}(?!)"
"""A pattern that takes 2^60 steps on any text."""


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("([^ ]+)", ENDLESS, "filter 'letters' is stopped"),
        (
            "{metric: exact_match}",
            f"{{metric: exact_match, regexes_to_ignore: ['{ENDLESS}']}}",
            "metric exact_match",
        ),
        ("([^ ]+)", "(", "filter 'letters' is stopped: error: missing"),
    ],
)
def test_a_pattern_of_a_task_ends(
    tmp_path: Path, tasks: Path, before: str, after: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_sandbox, "RENDER_CPU_SECONDS", 1.0)
    folder = tmp_path / "own"
    folder.mkdir()
    text = GENERATE.replace("FOLDER", str(tasks)).replace(before, after)
    (folder / "evil.yaml").write_text(text.replace("tiny_generate", "evil"))
    spec = asked(spec_of(LLAMA, tmp_path, folder), harness=["evil"])
    with pytest.raises(DataError, match=what):
        harness.score_model_on_tasks(spec, lambda text: None)


@pytest.mark.parametrize("line", ["doc_to_text: !function evilmod.text", "metric_list: [{metric: owner/code}]"])
def test_code_of_a_task_runs_only_if_the_command_line_allows_it(tmp_path: Path, tasks: Path, line: str) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "own"
    folder.mkdir()
    key = line.partition(":")[0]
    lines = [old for old in GENERATE.replace("FOLDER", str(tasks)).splitlines() if not old.startswith(key)]
    (folder / "evil.yaml").write_text("\n".join([*lines, line, ""]).replace("tiny_generate", "evil"))
    (folder / "evilmod.py").write_text(f"open({str(mark)!r}, 'w')\ndef text(doc): return doc['question']\n")
    spec = asked(spec_of(LLAMA, tmp_path, folder), harness=["evil"])
    with pytest.raises(UsageError, match=r"evaluate\.harness_include"):
        harness.score_model_on_tasks(spec, lambda text: None)
    assert not mark.exists()
    if "!function" in line:
        trusted = spec.model_copy(update={"limits": spec.limits.model_copy(update={"trust_remote_code": True})})
        assert harness.score_model_on_tasks(trusted, lambda text: None).tasks and mark.exists()
