"""Every command that an error suggests is typed in the state that suggests it, and does what the error says.

A row is a state, the command that fails in it, and words of the answer to the suggested command. Typical mistakes of a
new user have rows of their own in test_first_hour.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.config.files import machine
from engine.config.files.machine import install_command, install_packages
from engine.journal.control import send_request
from engine.journal.evaluations import Evaluation, append_evaluation, scoring
from engine.journal.events import EventWriter
from engine.journal.liveness import claim
from engine.journal.summary import summarise
from engine.journal.summary_text import detail_rows, result_rows
from engine.launch.create_run import resolve_start
from engine.launch.start_options import StartOptions
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import GOOD_DATA, make_run, write_profile, write_recipe
from tests.tui.recorded_stages import make_staged_run

State = Callable[[Path], None]


def own_files(folder: Path) -> None:
    (folder / "profiles" / "hardware").mkdir(parents=True)
    write_profile(folder / "profiles" / "hardware", name="mine")
    write_recipe(folder, name="r")
    (folder / "d").mkdir()
    (folder / "d" / "rows.jsonl").write_text(GOOD_DATA)
    (folder / "axolotl.yml").write_text("base_model: Qwen/Qwen2.5-0.5B\nlora_r: 8\n")
    (folder / "own.yml").write_text("base_model: builtin:tiny\ndatasets: [{path: d/rows.jsonl, type: completion}]\n")


def preferences(folder: Path) -> None:
    own_files(folder)
    row = {"prompt": "1 plus 1 is ", "chosen": "2", "rejected": "3"}
    (folder / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 8)


def chosen_conversations(folder: Path) -> None:
    own_files(folder)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    write_recipe(
        folder, ('tokenizer = "builtin:bytes"', f'tokenizer = "builtin:bytes"\nchat_template = "{template}"'), name="r"
    )
    turns = [{"role": "user", "content": "1 plus 1"}, {"role": "assistant", "content": "2"}]
    row = {"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "3"}]}
    (folder / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 8)


def too_long(folder: Path) -> None:
    own_files(folder)
    row = {"prompt": "1", "completion": "2" * 100}
    (folder / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 8)


HELD_OUT = '[[data.validation]]\nname = "held"\npath = "data.jsonl"\n'


def finished_run(folder: Path, more: str = "") -> None:
    run = make_run(folder, write_recipe(folder, more=more))
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("run_finished", status="done", exit_code=0, result="model")


def scored_runs(folder: Path) -> None:
    own_files(folder)
    for name, loss in (("one", 2.0), ("two", 1.0)):
        run = make_run(folder, write_recipe(folder, name=name))
        with EventWriter(run) as writer:
            writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
            writer.write("run_finished", status="done", exit_code=0, result="model")
        found = Evaluation("2026-11-26T12:00:00.000Z", 2, {"loss": loss}, 2, "same")
        with scoring(run, lambda text: None):
            append_evaluation(run, found, {"loss": [loss, loss]})


def waiting_run(folder: Path) -> None:
    make_run(folder, write_recipe(folder))


def staged_run(folder: Path) -> None:
    make_staged_run(folder / "runs")


def ended_run(status: str, code: int) -> State:
    """A run whose engine recorded how it ended, and a line in its log."""

    def state(folder: Path) -> None:
        run = make_run(folder, write_recipe(folder))
        run.log.write_text("the last words\n")
        with EventWriter(run) as writer:
            writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
            writer.write("run_finished", status=status, exit_code=code, result=None)

    return state


def stale_run(folder: Path) -> None:
    run = make_run(folder, write_recipe(folder))
    run.log.write_text("the last words\n")
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
    os.utime(run.events, (0, 0))


def run_in_use(folder: Path) -> None:
    waiting_run(folder)
    (run,) = (folder / "runs").iterdir()
    user = make_run(folder, write_recipe(folder, name="next"))
    user.run_toml.write_text(user.run_toml.read_text().replace("builtin:tiny", f"run:{run}"))


class Row(NamedTuple):
    """A state, a command that fails in it, words of its error, and words of what the suggested command prints."""

    state: State
    typed: str
    words: tuple[str, ...]
    answer: tuple[str, ...]


ROWS = {
    "data FILE": Row(own_files, "data d/rows.jsonl", ("-r r.toml",), ("8 sequences",)),
    "data RECIPE": Row(own_files, "data r.toml", ("-r r.toml",), ("8 sequences",)),
    "a file behind a recipe": Row(own_files, "data -r r.toml d/rows.jsonl", ("--set",), ("8 sequences",)),
    "plan FILE": Row(own_files, "plan d/rows.jsonl", ("-p mine -r r.toml",), ("on profile mine",)),
    "no profile": Row(own_files, "plan -r r.toml", ("-r r.toml -p mine",), ("on profile mine",)),
    "no profile of a start": Row(own_files, "queue add -r r.toml", ("fix: add -p mine",), ("is number 1",)),
    "nothing of a start": Row(own_files, "queue add", ("fix: add -p mine -r r.toml",), ("is number 1",)),
    "--config without -p": Row(own_files, "plan --config r.toml", ("-r r.toml -p mine",), ("on profile mine",)),
    "--config with -p": Row(own_files, "plan --config r.toml -p demo", ("-p demo",), ("on profile demo",)),
    "YAML as a recipe": Row(
        own_files, "plan -p mine -r axolotl.yml", ("YAML file of another tool",), ("imported axolotl",)
    ),
    "YAML by its path": Row(
        own_files, "plan -p mine -r ./axolotl.yml", ("YAML file of another tool",), ("imported axolotl",)
    ),
    "preference pairs": Row(preferences, "data -r r.toml", ("preferences", "trains on answers"), ("16 sequences",)),
    "preferred conversations": Row(chosen_conversations, "data -r r.toml", ("preferences",), ("16 sequences",)),
    "samples that are too long": Row(too_long, "data -r r.toml", ("longer than data.max_length",), ("8 sequences",)),
    "a stage for advise": Row(own_files, "advise -p 80gb -r expert-merge", ("add --stage",), ("recipe expert-merge",)),
    "delete RUN": Row(finished_run, "delete last", ("fix: tunedeck rm last",), ("-mine is now in", "/.trash/")),
    "a run that waits": Row(waiting_run, "stop last", ("is queued",), ("queued",)),
    "a run that has ended": Row(finished_run, "checkpoint last", ("is done", "tunedeck runs"), ("-mine", "done")),
    "a run that is not queued": Row(finished_run, "queue remove last", ("is not waiting",), ()),
    "one run to compare": Row(finished_run, "compare last", ("two different runs",), ("-mine", "done")),
    "no such stage": Row(staged_run, "show last/nothing", ("has not started a stage",), ("expert-qmsum",)),
    "no such chat": Row(finished_run, "chat --attach x", ("no chats in",), ()),
    "a run that others name": Row(run_in_use, "rename mine other", ("is used by",), ("other",)),
    "no such run": Row(finished_run, "show other", ("no run matches",), ("-mine", "done")),
    "gains of no score": Row(
        scored_runs, "compare one two --against one", ("needs --metric",), ("loss", "gain over")
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def suggested(typed: str, block: str) -> list[str]:
    """The words of the command that the block's fix says to type, or of the refused one with what it says to add."""
    fix = block.partition("fix: ")[2].strip()
    if "tunedeck " in fix:
        return shlex.split(re.split(r"[;,]", fix.partition("tunedeck ")[2])[0])
    option = re.match(r"add (-.*?)(?:; |$)", fix)
    assert option is not None, fix
    return [*shlex.split(typed), *shlex.split(option[1])]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_suggested_command_does_what_the_error_says(tunedeck: Tunedeck, tmp_path: Path, row: Row) -> None:
    row.state(tmp_path)
    refused = tunedeck(*shlex.split(row.typed))
    refused.complains(refused.code, *row.words)
    assert refused.code in (1, 2, 3, 5, 6)
    answer = tunedeck(*suggested(row.typed, refused.err))
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in row.answer), answer.out


PRINTED = {
    "imported": Row(own_files, "recipes import own.yml", (), ("fits", "on profile mine")),
    "exported": Row(finished_run, "export last", (), ("repeat it",)),
    "of a failed run": Row(ended_run("failed", 1), "show last", (), ("the last words",)),
    "of a run out of memory": Row(ended_run("oom", 4), "show last", (), ("no out-of-memory events",)),
    "of a run that is done": Row(ended_run("done", 0), "watch last", (), ("done",)),
}


@pytest.mark.parametrize("row", PRINTED.values(), ids=PRINTED.keys())
def test_a_command_that_is_printed_as_the_next_can_be_typed(tunedeck: Tunedeck, tmp_path: Path, row: Row) -> None:
    row.state(tmp_path)
    printed = tunedeck(*shlex.split(row.typed)).out
    command = re.findall(r"tunedeck (\w.*)", printed)[0]
    answer = tunedeck(*shlex.split(re.split(r"[;,]", command)[0]))
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in row.answer), answer.out


def test_the_log_of_a_stale_run_is_where_its_wait_says(tunedeck: Tunedeck, tmp_path: Path) -> None:
    stale_run(tmp_path)
    refused = tunedeck("wait", "last")
    refused.complains(1, "without recording how the run ended", "tunedeck resume ")
    assert "the last words" in tunedeck(*suggested("", refused.err)).out


def test_a_change_that_a_run_cannot_take_starts_a_new_one(tunedeck: Tunedeck, tmp_path: Path) -> None:
    ended_run("stopped", 130)(tmp_path)
    refused = tunedeck("resume", "last", "--set", "data.max_length=32")
    refused.complains(2, "data.max_length: 64 -> 32", "tunedeck train --run-spec ", "--set data.max_length=32")
    command = suggested("", refused.err)
    assert (command[:2], command[3]) == (["train", "--run-spec"], "--set")
    spec = resolve_start(StartOptions(run_spec=Path(command[2]), overrides=command[4:])).spec
    assert spec.recipe.data.max_length == 32


def test_packages_to_install_are_named_with_the_versions_that_are_needed() -> None:
    command = shlex.split(install_command("train", ["torch", "peft"]))
    assert command[:2] == ["pip", "install"]
    assert [re.split("[<>=,]", word)[0] for word in command[2:]] == ["torch", "peft"]
    assert all(">=" in word for word in command[2:]), "the requirements of the extra"
    assert install_command("cuda", ["bitsandbytes"]) == "pip install bitsandbytes"


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("pipx_metadata.json", "{}", "pipx runpip tunedeck install 'peft>=1'"),
        ("pyvenv.cfg", "include-system-site-packages = false\n", "pip install 'peft>=1'"),
        ("pyvenv.cfg", "uv = 0.13\n", "uv pip install --python {0}/bin/python 'peft>=1'"),
        ("pyvenv.cfg", "uv = 0.13\nrelocatable = true\n", "uvx --with 'peft>=1' tunedeck, in place of uvx tunedeck"),
    ],
    ids=["pipx", "venv without pip", "uv venv and uv tool", "uvx"],
)
def test_packages_are_installed_by_what_made_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, command: str
) -> None:
    prefix = tmp_path / "tunedeck"
    prefix.mkdir()
    (prefix / file).write_text(text)
    monkeypatch.setattr("sys.prefix", str(prefix))
    if file != "pipx_metadata.json":
        monkeypatch.setattr(machine, "find_spec", lambda name: None)  # uv leaves pip out
    assert install_packages("peft>=1") == command.format(prefix)


def test_a_run_that_is_stopping_is_waited_for_and_not_stopped_by_force(tunedeck: Tunedeck, tmp_path: Path) -> None:
    run = make_run(tmp_path, write_recipe(tmp_path))
    with claim(run), EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        tunedeck("resume", "last").complains(6, f"fix: stop it first: tunedeck stop {run.name}")
        send_request(run, "stop")
        refused = tunedeck("resume", "last")
        refused.complains(6, f"tunedeck wait {run.name}", "repeat the command")
        writer.write("run_finished", status="stopped", exit_code=130, result=None)
    assert tunedeck(*suggested("", refused.err)).code == 130


def test_a_shown_run_suggests_something_else(tunedeck: Tunedeck, tmp_path: Path) -> None:
    finished_run(tmp_path, HELD_OUT)
    shown = tunedeck("show", "last").out
    following = [line.partition("tunedeck ")[2] for line in shown.splitlines() if "  tunedeck " in line]
    assert following and not any(line.startswith("show") for line in following), shown
    assert "tunedeck queue list" not in shown


def test_a_run_without_held_out_data_suggests_no_evaluation(tunedeck: Tunedeck, tmp_path: Path) -> None:
    """Regression: the printed `tunedeck eval RUN` was refused for want of data."""
    finished_run(tmp_path)
    assert "tunedeck eval" not in tunedeck("show", "last").out


def test_of_a_stage_the_next_command_finds_it(tunedeck: Tunedeck, tmp_path: Path) -> None:
    """Regression: `tunedeck show RUN/STAGE` ended with `tunedeck eval 02-STAGE`, which is no run."""
    run = make_staged_run(tmp_path / "runs")
    with (run.stages / "02-expert-qmsum" / "run.toml").open("a") as spec:
        spec.write(HELD_OUT.replace("[[data", "[[recipe.data"))
    shown = tunedeck("show", f"{run.name}/expert-qmsum").out
    (command,) = re.findall(r"tunedeck (\w.*)", shown)
    assert command.split()[-1] == f"{run.name}/expert-qmsum"
    assert tunedeck("show", command.split()[-1]).code == 0


def test_of_a_staged_run_that_failed_the_log_of_the_stage_is_named(tunedeck: Tunedeck, tmp_path: Path) -> None:
    """Regression: the log of the run as a whole is empty."""
    run = make_staged_run(tmp_path / "runs")
    with EventWriter(run) as writer:
        writer.write("stage_finished", name="expert-qmsum", number=1, status="failed", exit_code=7)
        writer.write("run_finished", status="failed", exit_code=7, result=None)
    assert f"tunedeck log {run.name}/expert-qmsum" in tunedeck("show", run.name).out


def test_a_command_that_is_hidden_is_not_suggested(tunedeck: Tunedeck) -> None:
    tunedeck("engine", "x").complains(2, "No such command 'engine'.\n", "fix: tunedeck --help")


def test_a_waiting_run_suggests_the_queue(tunedeck: Tunedeck, tmp_path: Path) -> None:
    waiting_run(tmp_path)
    assert "tunedeck queue list" in tunedeck("show", "last").out
    assert tunedeck("queue", "list").code == 0


def test_a_method_of_preferences_is_told_what_exists(tunedeck: Tunedeck, tmp_path: Path) -> None:
    own_files(tmp_path)
    given = ("plan", "-p", "mine", "-r", "r.toml", "--set")
    tunedeck(*given, "method.kind=dpo").complains(2, '"lora", "full" is allowed', 'method.objective = "dpo"')
    tunedeck(*given, "method.kind=ppo").complains(2, "training on rewards is not supported")


def test_data_given_as_a_model_go_into_a_source(tunedeck: Tunedeck, tmp_path: Path) -> None:
    own_files(tmp_path)
    given = ("plan", "-p", "mine", "-r", "r.toml", "--set")
    tunedeck(*given, "model.id=d/rows.jsonl").complains(2, "is a file", "--set data.sources.0.path=d/rows.jsonl")
    assert tunedeck(*given, "data.sources.0.path=d/rows.jsonl").code == 0


def test_a_file_given_as_a_data_set_of_the_hub_goes_into_path(tunedeck: Tunedeck, tmp_path: Path) -> None:
    own_files(tmp_path)
    hub = ("--set", "data.sources.main.hub=d/rows.jsonl", "--set", "data.sources.main.path=")
    refused = tunedeck("data", "-r", "r.toml", *hub)
    refused.complains(2, '"d/rows.jsonl" is a file here', "path = ")
    assert "download" not in refused.err
    assert tunedeck("data", "-r", "r.toml", "--set", "data.sources.main.path=d/rows.jsonl").code == 0


def test_old_names_say_the_new_one_and_work(tunedeck: Tunedeck, tmp_path: Path) -> None:
    own_files(tmp_path)
    old, new = (tunedeck(name, "-p", "mine", "-r", "r.toml") for name in ("fit", "advise"))
    assert (old.code, old.out) == (new.code, new.out)
    assert "fit has been renamed to advise" in old.err and old.err.endswith(new.err)
    assert "forward has been renamed to sync" in tunedeck("forward", "last").err
    assert not re.search(r"^  (fit|forward) ", tunedeck("--help").out, re.MULTILINE)


def test_a_stage_is_found_by_the_path_of_its_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    run = make_staged_run(tmp_path / "runs")
    by_name, by_path = (tunedeck("show", f"{place}/expert-qmsum", "--json") for place in (run.name, f"runs/{run.name}"))
    assert by_path.code == 0, by_path.err
    assert by_path.out == by_name.out
    tunedeck("show", f"runs/{run.name}/nothing").complains(2, "nothing")


def test_the_peak_of_several_stages_stands_alone(tmp_path: Path) -> None:
    """What was predicted last belongs to the last stage."""
    summary = summarise(make_staged_run(tmp_path / "runs"))
    assert len(summary.stages) > 1 and summary.predicted
    assert "predicted" not in dict(result_rows(replace(summary, measured={"peak_bytes": 5 << 20})))["peak memory"]


def test_on_a_plain_cpu_no_plan_of_tensors_stands_beside_the_process(tmp_path: Path) -> None:
    measured = {"peak_bytes": 140 << 20, "components": {"activations": 130 << 20}}
    run = make_run(tmp_path, write_recipe(tmp_path))
    with EventWriter(run) as writer:
        writer.write("run_finished", status="done", exit_code=0, result="model", measured=measured)
    words = dict(result_rows(summarise(run)))["peak memory"]
    assert "of the whole process" in words and "predicted" not in words
    assert "predicted" not in str(detail_rows(summarise(run)))
