"""Fixes of the command line that need no model: what they say is typed in the state that gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.events import EventWriter
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_recipe
from tests.cli.test_fixes import HELD_OUT, finished_run, own_files, scored_runs
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, walk

LAUNCH = "launch -p 80gb -r r.toml"
TWO_STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'


def other_script(folder: Path) -> None:
    own_files(folder)
    (folder / "s.sh").write_text("edited\n")


def staged_recipe(folder: Path) -> None:
    own_files(folder)
    write_recipe(folder, name="s", more=TWO_STAGES)


def sweep(folder: Path) -> None:
    own_files(folder)
    write_recipe(folder, name="w", more='\n[sweep]\n"train.seed" = [1, 2]\n')


def large_sweep(folder: Path) -> None:
    own_files(folder)
    write_recipe(folder, name="w", more='\n[sweep]\n"train.seed" = [' + ", ".join(map(str, range(200))) + "]\n")


def archived(folder: Path) -> None:
    finished_run(folder)
    (folder / "taken.zip").write_text("something else")


def texts(folder: Path) -> None:
    own_files(folder)
    (folder / "data.jsonl").write_text('{"text": "one sentence"}\n' * 8)


def two_alike(folder: Path) -> None:
    for name in ("one", "two"):
        make_run(folder, write_recipe(folder, name=name))


def begun(folder: Path) -> None:
    run = make_run(folder, write_recipe(folder))
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("run_finished", status="stopped", exit_code=130, result=None)


def begun_with_data(folder: Path) -> None:
    run = make_run(folder, write_recipe(folder, more=HELD_OUT))
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("run_finished", status="stopped", exit_code=130, result=None)


def file_for_folder(folder: Path) -> None:
    begun(folder)
    (run,) = (folder / "runs").iterdir()
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("")


def move_away(folder: Path) -> None:
    (run,) = (folder / "runs").iterdir()
    (run / "checkpoints").rename(folder / "moved")


def report_taken(folder: Path) -> None:
    finished_run(folder)
    (folder / "taken.md").write_text("mine")


ROWS = {
    "commands/library:import_recipe: use one of them": Row(
        own_files, "recipes import r.toml --name other --to other.toml", "recipes import r.toml --to other.toml",
        answer="imported other",
    ),
    "commands/launch:_launcher: leave one out": Row(
        own_files, f"{LAUNCH} --target modal --slurm", f"{LAUNCH} --slurm", answer="sbatch"
    ),
    "commands/launch:_launcher: add one of them": Row(own_files, LAUNCH, f"{LAUNCH} --target slurm", answer="sbatch"),
    "commands/launch:_refuse_what_target_ignores: leave it out, or add": Row(
        own_files, f"{LAUNCH} --slurm --image i", f"{LAUNCH} --image i --target kubernetes", answer="kubectl"
    ),
    "commands/launch:_refuse_what_target_ignores: leave it out": Row(
        own_files, f"{LAUNCH} --slurm --gpu H100", f"{LAUNCH} --slurm", answer="sbatch"
    ),
    "commands/launch:_require_what_target_needs: add --gpu NAME": Row(
        own_files, f"{LAUNCH} --target skypilot", f"{LAUNCH} --target skypilot --gpu H100", answer="submit"
    ),
    "commands/launch:_require_what_target_needs: build one": Row(
        own_files, f"{LAUNCH} --target kubernetes", f"{LAUNCH} --target kubernetes --image i", answer="kubectl"
    ),
    "commands/launch:_require_what_target_needs: such as --gpu": Row(
        own_files, f"{LAUNCH} --target modal --image i", f"{LAUNCH} --target modal --image i --gpu H100", answer="modal"
    ),
    "commands/launch:_require_what_target_needs: add --target jobset": Row(
        own_files,
        f"{LAUNCH} --target runpod --image i --gpu g --set nodes.count=2 --set parallel.strategy=replicated",
        f"{LAUNCH} --target jobset --image i --set nodes.count=2 --set parallel.strategy=replicated",
        answer="submit",
    ),
    "commands/launch:_write: choose another path": Row(
        own_files, f"{LAUNCH} --slurm --out d/rows.jsonl/s.sh", f"{LAUNCH} --slurm --out s.sh", answer="sbatch"
    ),
    "commands/launch:_refuse_to_replace": Row(
        other_script, f"{LAUNCH} --slurm --out s.sh", f"{LAUNCH} --slurm --out t.sh", answer="sbatch"
    ),
    "commands/plan:plan: name it": Row(
        staged_recipe, "plan -p mine -r s.toml --exact", "plan -p mine -r s.toml --exact --stage one"
    ),
    "commands/plan:advise": Row(staged_recipe, "advise -p mine -r s.toml", answer="s"),
    "config/stages:enabled_stage": Row(own_files, "plan -p mine -r r.toml --stage no", "plan -p mine -r r.toml"),
    "config/sweep:sweep_points": Row(
        large_sweep, "queue add -p mine -r w.toml", "queue add -p mine -r w.toml --force", answer="200"
    ),
    "config/sweep:refuse_sweep": Row(
        sweep, f"{LAUNCH.replace('r.toml', 'w.toml')} --slurm",
        f"{LAUNCH.replace('r.toml', 'w.toml')} --slurm --set sweep=", answer="sbatch",
    ),
    "commands/doctor:doctor": Row(own_files, "doctor -p mine", "doctor -p mine --gpus", answer="ok"),
    "commands/compare:_metric: add --metric loss": Row(
        scored_runs, "compare one two --against one", "compare one two --against one --metric loss", answer="loss"
    ),
    "commands/share:report: choose another file": Row(
        report_taken, "report last --out taken.md", "report last --out other.md", answer="other.md"
    ),
    "commands/models:models": Row(
        own_files, "models nothing-of-this-name", "plan -p mine -r r.toml --set model.id=builtin:tiny"
    ),
    "commands/handover:handover": Row(finished_run, "handover last", code=2),
    "commands/evaluate:_both_files: {model}": Row(own_files, "eval builtin:tiny -p demo", "plan -p demo -r demo"),
    "commands/evaluate:harness_overrides": Row(
        scored_runs, "eval one --include-path d", "eval one --include-path d --harness arc_easy", code=6
    ),
    "commands/background:_trackers_of": Row(finished_run, "sync last", code=6),
    "commands/runs:_request": Row(begun, "pause last", "resume last --set train.max_steps=1", code=0),
    "commands/handover:push": Row(finished_run, "push last me/model", code=2),
    "data/recognise:_check_template": Row(
        texts, "data -r r.toml --set data.sources.main.template=chat", answer="8 sequences"
    ),
    "journal/archive:export_run: choose another file with --out, or": Row(
        archived, "export last --out taken.zip", "export last --out other.zip", answer="other.zip"
    ),
    "journal/archive:export_run: choose another file with --out": Row(
        archived, "export last --out taken.zip/x.zip", "export last --out other.zip", answer="other.zip"
    ),
    "journal/index:_require_one": Row(two_alike, "show 20", "show one", answer="one"),
    "journal/compare:parse_condition": Row(
        scored_runs, "compare one two --fail-if nonsense", "compare one two --fail-if 'loss > 1%'", code=0
    ),
    "journal/folder_summaries:runs_of_sweep": Row(finished_run, "compare sweep:no", "runs"),
    "launch/resume_run:_refuse_file_for_folder": Row(file_for_folder, "resume last", "resume last", move_away),
    "launch/resume_run:_refuse_other_runs_option: leave": Row(
        begun, "resume last --from-stage no", "resume last", code=0
    ),
    "launch/resume_run:_require_checkpoint": Row(begun, "resume last --from 7", "resume last"),
    "launch/resume_run:_refuse_if_done": Row(finished_run, "resume last", answer="4 of 4"),
    "launch/other_processes:find_chat": Row(own_files, "chat --attach no", answer="no chats"),
    "evaluate/run:checkpoints_to_score: {'' if": Row(begun_with_data, "eval last", answer="done"),
    "extras/chat/sources:weights_of_run": Row(begun, "chat last --prompt x", answer="done"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)
