"""Task files of somebody else: what in them runs code, or opens what is not in their folder, is named and rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.errors import UsageError
from engine.extras.harness.task_files import read_task_files, refuse_untrusted_tasks

PLAIN = """task: plain
dataset_path: json
dataset_kwargs: {data_files: {test: d.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
metric_list:
  - metric: exact_match
"""

CODE = {
    "a function": ("doc_to_text: !function evilmod.text", "6: the tag !function"),
    "a function of an installed module": ("process_docs: !function os.system", "the tag !function"),
    "Python's own tags": ("metadata: !!python/object/apply:os.system [id]", "the tag tag:yaml.org,2002:python"),
    "a class": ("class: evilmod.Task", "class: a task defined by a Python class"),
    "a class of a task in a group": ("group: g\ntask: [{task: t, class: x.Y}]", "Python class"),
    "a prompt of a file": ("use_prompt: /tmp/x.yaml:p", "use_prompt"),
    "a metric of the hub": ("metric_list: [{metric: x/y, hf_evaluate: true}]", "hf_evaluate"),
    "Python objects as data": ("dataset_path: pandas", "dataset_path"),
    "a database as data": ("dataset_path: sql", "dataset_path"),
    "a folder with a script": ("dataset_path: ./tasks", "dataset_path"),
    "an address as data": ("dataset_kwargs: {data_files: {test: 'http://169.254.169.254/'}}", "is a URL"),
    "a chain of file systems": ("dataset_kwargs: {data_files: 'zip://x::file:///etc/passwd'}", "is a URL"),
    "trust in code": ("dataset_kwargs: {trust_remote_code: true}", "trust_remote_code of datasets"),
    "options by a merge": ("x: &a {trust_remote_code: true}\ndataset_kwargs: {<<: *a}", "the option << of datasets"),
    "answers without end": ("repeats: 0xfffffff", "repeats: 0xfffffff is not a number from 0 to 1,000"),
    "a count that is no number": ("num_fewshot: !!int x", "num_fewshot: x is not a number from 0 to 1,000"),
    "a file elsewhere": ("include: ../other.yaml", "is outside the tasks' folder"),
    "an absolute file": ("include: [/etc/passwd]", "is outside the tasks' folder"),
    "code in another file": ("include: parts/other", "other:1: doc_to_text: the tag !function"),
}


def folder_with(folder: Path, text: str) -> Path:
    """A folder of tasks, with one more line in its task; another file has code."""
    tasks = folder / "tasks"
    (tasks / "parts").mkdir(parents=True)
    (tasks / "parts" / "other").write_text("doc_to_text: !function evilmod.text\n")
    (tasks / "task.yaml").write_text(PLAIN + text + "\n")
    return tasks


@pytest.mark.parametrize("case", CODE)
def test_code_and_other_places_are_named_and_need_the_command_line(tmp_path: Path, case: str) -> None:
    text, problem = CODE[case]
    tasks = folder_with(tmp_path, text)
    with pytest.raises(UsageError, match=r"evaluate\.harness_include: ") as caught:
        refuse_untrusted_tasks(tasks, trusted=False)
    assert problem.split(": ")[-1] in caught.value.found and "--trust-remote-code" in (caught.value.fix or "")
    assert refuse_untrusted_tasks(tasks, trusted=True) is None


def test_tasks_without_code_need_no_word(tmp_path: Path) -> None:
    tasks = folder_with(tmp_path, "dataset_name: main\ntag: [a, b]\nfewshot_config: {sampler: first_n}")
    (tasks / "hub.yaml").write_text("task: hub\ndataset_path: openai/gsm8k\ninclude: task.yaml\n")
    files = refuse_untrusted_tasks(tasks, trusted=False)
    assert files is not None and files.problems == () and files.metrics == {"exact_match"}


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "with its aliases"),
        ("x: &x [*x]", "inside its own value"),
        ("metadata: {version: " + "1" * 100_000 + "}", "a number of 100000 characters"),
        ("metadata: {version: " + ":".join(["1"] * 50_000) + "}", "a number of 99999 characters"),
        ('x: !!int "' + ":".join(["1"] * 50_000) + '"', "a number of 99999 characters"),
        ("x: " + "[" * 100_000, "is not YAML"),
        ("x: " + "a" * 2**20, "is larger than"),
        ("\x00", "is not YAML"),
    ],
)
def test_a_file_beyond_a_bound_is_rejected_at_once(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_task_files(folder_with(tmp_path, text))


def test_the_check_of_a_recipe_reports_code_in_its_tasks(tmp_path: Path) -> None:
    folder_with(tmp_path, "doc_to_text: !function evilmod.text")
    recipe = tmp_path / "shared.toml"
    recipe.write_text(
        'schema = 1\nkind = "recipe"\ntitle = "x"\n[model]\nid = "builtin:tiny"\n[method]\nkind = "lora"\nrank = 4\n'
        '[data]\nmax_length = 64\n[[data.sources]]\nname = "dates"\npath = "builtin:dates"\n'
        '[train]\nmax_steps = 2\nbatch_size = 4\n[evaluate]\nharness = ["plain"]\nharness_include = "tasks"\n'
    )
    checked = CliRunner().invoke(app, ["recipes", "check", str(recipe), "--json"])
    (note,) = json.loads(checked.stdout)["notes"]
    assert "task.yaml:10: the tag !function" in note and "--trust-remote-code" in note
