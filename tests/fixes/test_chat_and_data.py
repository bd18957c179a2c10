"""Fixes of `chat`, `eval`, `data`, imports and starts: what they say is typed in the state that gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_recipe
from tests.cli.test_fixes import finished_run, own_files
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, text_of, walk, was_given
from tests.fixes.test_commands import begun, staged_recipe
from tests.fixes.test_settings import DATA, ROWS_PATH, at, right_toml, rows_of

CHAT = "chat builtin:tiny -p demo"
EVAL = "eval builtin:tiny -p demo -r demo --limit 1"


def prefer_after_adapter(folder: Path) -> None:
    own_files(folder)
    write_recipe(
        folder, ('kind = "full"', 'kind = "lora"'), name="p",
        more='\n[[stages]]\nname = "imitate"\n\n[[stages]]\nname = "prefer"\nfrom = "imitate"\n'
        'method = { objective = "dpo" }\npreference = { reference = "adapter_off" }\n',
    )  # fmt: skip


def unknown_key(folder: Path) -> None:
    own_files(folder)
    (folder / "w.toml").write_text((folder / "r.toml").read_text() + "\n[tain]\nmax_steps = 1\n")


def one_text(folder: Path) -> None:
    own_files(folder)
    (folder / "text.txt").write_text("one two three\n" * 9)


def table(folder: Path) -> None:
    own_files(folder)
    (folder / "rows.csv").write_text("prompt,completion\n1,2\n")


def tagged_yaml(folder: Path) -> None:
    own_files(folder)
    (folder / "a.yml").write_text("base_model: !odd builtin:tiny\ndatasets: [{path: d/rows.jsonl, type: completion}]\n")


def plain_yaml(folder: Path) -> None:
    (folder / "a.yml").write_text("base_model: builtin:tiny\ndatasets: [{path: d/rows.jsonl, type: completion}]\n")


def double_yaml(folder: Path) -> None:
    plain_yaml(folder)
    own_files(folder)
    (folder / "a.yml").write_text((folder / "a.yml").read_text() + "base_model: builtin:tiny\n")


def anchored_yaml(folder: Path) -> None:
    own_files(folder)
    (folder / "a.yml").write_text(
        "base_model: &it builtin:tiny\ntokenizer: *it\ndatasets: [{path: d/rows.jsonl, type: completion}]\n"
    )


def pointer(folder: Path) -> None:
    own_files(folder)
    (folder / "rows.jsonl").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    )


def fetched(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')


def prompts_missing(folder: Path) -> None:
    own_files(folder)


def prompts_there(folder: Path) -> None:
    (folder / "asked.txt").write_text("one\n")


LABELLED = [{"prompt": "1 plus 1", "completion": "2", "label": True}] * 4
BETTER = [{"prompt": "1 plus 1", "better": "2", "worse": "3"}] * 4

ROWS = {
    "commands/chat:chat: add --prompt": Row(own_files, f"{CHAT} --json", f"{CHAT} --json --prompt hi"),
    "commands/chat:chat: leave out --prompt": Row(
        own_files, f"{CHAT} --attach x --prompt hi", f"{CHAT} --attach x", answer="no chats", code=2
    ),
    "commands/chat:_switch": Row(
        own_files, f"{CHAT} --prompt x --think maybe", f"{CHAT} --prompt x --think off", answer="thinking", code=2
    ),
    "data/prompts:_thinking": Row(own_files, f"{CHAT} --prompt x --think on", f"{CHAT} --prompt x"),
    "commands/chat_sources:_run_spec": Row(
        begun, "chat last --prompt x --set train.epochs=1", "chat last --prompt x",
        answer="has no result or checkpoint yet", code=2,
    ),
    "commands/model_specs:spec_for_base": Row(
        own_files, f"{CHAT} --base --prompt x", "chat builtin:tiny builtin:tiny -p demo --prompt x"
    ),
    "config/files/data_files:read_prompts: correct the file or": Row(
        prompts_missing, f"{CHAT} --file asked.txt", f"{CHAT} --file asked.txt", prompts_there
    ),
    "commands/evaluate:_find_run": Row(own_files, "eval builtin:tiny", EVAL),
    "commands/model_specs:spec_for_base: give the base": Row(
        own_files, f"{EVAL} --base", EVAL.replace("builtin:tiny", "builtin:tiny builtin:tiny")
    ),
    "commands/handover:require_weights": Row(begun, "merge last", answer="done"),
    "commands/data:data": Row(staged_recipe, "data -r s.toml --row 1", answer="sample 1"),
    "commands/data:chosen_rows: add --row": Row(own_files, f"{DATA} --row 99", f"{DATA} --row 8"),
    "commands/data:chosen_rows: search for": Row(own_files, f"{DATA} --find Plus", f"{DATA} --find plus"),
    "commands/doctor_gpus:_devices": Row(own_files, "doctor --gpus", answer="ok"),
    "config/check/preference_rules:no_adapter_to_switch_off": Row(prefer_after_adapter, "plan -p mine -r p.toml"),
    "config/files/write:import_spec_file": Row(
        unknown_key, "recipes import w.toml", "recipes import w.toml", right_toml
    ),
    "extras/imports/convert:_require_plain: remove the tag": Row(
        tagged_yaml, "recipes import a.yml", "recipes import a.yml", plain_yaml
    ),
    "extras/imports/convert:_require_plain: write out the value": Row(
        anchored_yaml, "recipes import a.yml", "recipes import a.yml", plain_yaml
    ),
    "extras/imports/convert:_require_unique": Row(
        double_yaml, "recipes import a.yml", "recipes import a.yml", plain_yaml
    ),
    "data/dataset_files:_open_local: fetch": Row(pointer, DATA + ROWS_PATH, DATA + ROWS_PATH, fetched),
    "data/dataset_files:_unit_of_table": Row(
        table, DATA + at("data.sources.main.path", "rows.csv") + at("data.sources.main.unit", "document")
    ),
    "data/dataset_files:_rows_one_by_one": Row(
        one_text, DATA + at("data.sources.main.path", "text.txt") + at("data.sources.main.unit", "<end>")
    ),
    "data/preferences:other_objective: add --set method.objective=dpo --set": Row(
        rows_of(*LABELLED), DATA + ROWS_PATH + at("data.sources.main.format", "unpaired-preference"),
        answer="4 sequences",
    ),
    "data/recognise:_unclear: {_columns": Row(
        rows_of(*BETTER), DATA + ROWS_PATH + at("method.objective", "dpo"),
        DATA + ROWS_PATH + at("method.objective", "dpo")
        + " --set 'data.sources.main.columns={chosen = \"better\", rejected = \"worse\"}'",
    ),
    "launch/create_run:resolve_start: leave out one of them": Row(
        finished_run, "train --run-spec x.toml -r mine.toml", "plan -p here.toml -r mine.toml"
    ),
    "checks/machine:require_trackers": Row(
        own_files, "queue add -p mine -r r.toml" + at("trackers.use", "[\\\"mlflow\\\"]"),
        "queue add -p mine -r r.toml" + at("trackers.use", "[]"),
    ),
    "model/named_templates:named_template": Row(
        own_files, DATA + at("model.chat_template", "llama3"), f"{DATA} --set model.chat_template=plain"
    ),
    "journal/index:_at_path": Row(own_files, "show ./d", "runs"),
    "commands/wrong_usage:refusal": Row(own_files, "plans -p mine -r r.toml"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)


RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
UNDER_LAUNCHER = {
    "launch/environment:refuse_stages": ("train -p two -r s.toml", "train -p mine -r s.toml", ("RANK", "WORLD_SIZE")),
    "launch/environment:require_launchable": ("train -p two -r r.toml --detach", "plan -p two -r r.toml", ()),
}


@pytest.mark.parametrize("key", UNDER_LAUNCHER)
def test_under_a_launcher_what_is_said_helps(
    key: str, tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right, gone = UNDER_LAUNCHER[key]
    staged_recipe(tmp_path)
    profile = (tmp_path / "profiles" / "hardware" / "mine.toml").read_text()
    two = profile.replace('name = "mine"', 'name = "two"').replace("8.0", "8.0\ncount = 2")
    (tmp_path / "profiles" / "hardware" / "two.toml").write_text(two)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert tunedeck(*wrong.split()).code == 2
    assert was_given(text_of(key), given), given
    for name in gone:
        monkeypatch.delenv(name)
    assert tunedeck(*right.split()).code == 0
