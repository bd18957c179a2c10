"""Fixes that name a setting, an option or a variable: what they say is set, and the same command then goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import GOOD_DATA, write_profile
from tests.cli.test_fixes import own_files
from tests.cli.test_gate import LLAMA
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, State, text_of, walk, was_given

PLAN = "plan -p mine -r r.toml"
DATA = "data -r r.toml"


def model_of(**changes: object) -> State:
    """A state with a model's config in the folder `model`."""

    def state(folder: Path) -> None:
        own_files(folder)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({**LLAMA, **changes}))

    return state


def rows_of(*rows: object) -> State:
    def state(folder: Path) -> None:
        own_files(folder)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return state


def sound_config(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))


def broken_config(folder: Path) -> None:
    model_of()(folder)
    (folder / "model" / "config.json").write_text("{")


def more_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(GOOD_DATA)


def adapter(folder: Path) -> None:
    own_files(folder)
    (folder / "adapter").mkdir()
    config = {"base_model_name_or_path": "builtin:tiny", "peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def not_parquet(folder: Path) -> None:
    own_files(folder)
    (folder / "rows.parquet").write_text(GOOD_DATA)


def named_by_its_format(folder: Path) -> None:
    (folder / "rows.parquet").rename(folder / "rows.jsonl")


def file_as_queue(folder: Path) -> None:
    own_files(folder)
    (folder / "runs").mkdir()
    (folder / "runs" / ".queue").write_text("")


def two_machines(folder: Path) -> None:
    own_files(folder)
    write_profile(
        folder / "profiles" / "hardware", ("memory_gib = 8.0", "memory_gib = 8.0\n\n[nodes]\ncount = 2"), name="both"
    )


def mend(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')


def wrong_toml(folder: Path) -> None:
    own_files(folder)
    (folder / "w.toml").write_text("model = {\n")


def right_toml(folder: Path) -> None:
    (folder / "w.toml").write_bytes((folder / "r.toml").read_bytes())


def latin(folder: Path) -> None:
    own_files(folder)
    (folder / "w.toml").write_bytes((folder / "r.toml").read_bytes() + b"# \xe9\n")


def two_formats(folder: Path) -> None:
    own_files(folder)
    (folder / "t").mkdir()
    (folder / "t" / "a.csv").write_text("prompt,completion\n1,2\n")
    (folder / "t" / "b.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')


def no_suffix(folder: Path) -> None:
    own_files(folder)
    (folder / "rows.dat").write_text('{"prompt": "1", "completion": "2"}\n')


def rename_rows(folder: Path) -> None:
    (folder / "rows.dat").rename(folder / "rows.jsonl")


def own_code(folder: Path) -> None:
    model_of(model_type="unheard_of", auto_map={"AutoModelForCausalLM": "modeling.Own"})(folder)


def at(key: str, value: str) -> str:
    return f" --set {key}={value}"


def template_of_bytes(folder: Path) -> None:
    own_files(folder)
    (folder / "bytes.jinja").write_bytes(b"\xff\xfe")


MODEL = at("model.id", "./model") + at("model.tokenizer", "builtin:bytes")
SCALED = at("model.rope_scaling.type", "yarn") + at("model.rope_scaling.factor", "2")
ROWS_PATH = at("data.sources.main.path", "rows.jsonl")

ROWS = {
    "architecture/lookup:_config_file: check model.id": Row(
        own_files, PLAN + at("model.id", "./none"), PLAN + at("model.id", "builtin:tiny")
    ),
    "architecture/positions:refuse_long_sequences: {fix}": Row(
        model_of(), PLAN + MODEL + at("data.max_length", "512"),
        PLAN + MODEL + at("data.max_length", "512") + SCALED, answer="512",
    ),
    "architecture/positions:refuse_long_sequences: set model.rope_scaling.factor": Row(
        model_of(), PLAN + MODEL + at("data.max_length", "1000") + SCALED,
        PLAN + MODEL + at("data.max_length", "1000") + SCALED + at("model.rope_scaling.factor", "4"), answer="1000",
    ),
    "architecture/positions:scaled_config: leave out model.rope_scaling": Row(
        model_of(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        PLAN + MODEL + SCALED, PLAN + MODEL,
    ),
    "architecture/support:refuse_unsafe_packing": Row(
        model_of(model_type="mamba"), PLAN + MODEL + at("data.packing", "true"), PLAN + at("data.packing", "false")
    ),
    "architecture/classes:_not_text_alone": Row(
        model_of(model_type="t5"), PLAN + MODEL, PLAN + at("model.id", "builtin:tiny")
    ),
    "architecture/facts:_sliding_layers": Row(
        model_of(sliding_window=8, layer_types=["sliding_attention"]), PLAN + MODEL, PLAN + MODEL,
        sound_config,
    ),
    "architecture/lookup:_read_json: check the folder": Row(
        broken_config, PLAN + MODEL, PLAN + MODEL, sound_config
    ),
    "config/check/hardware_rules:require_matching_devices: leave out --devices": Row(
        own_files, "train -p mine -r r.toml --devices 0", "train -p mine -r r.toml", answer="done"
    ),
    "config/check/hardware_rules:require_matching_devices: list {count}": Row(
        own_files, "queue add -p 4xh100 -r r.toml --devices 0,1", "queue add -p 4xh100 -r r.toml --devices 0,1,2,3"
    ),
    "config/check/hardware_rules:require_launcher": Row(
        two_machines, "train -p both -r r.toml", "launch -p both -r r.toml --slurm", answer="sbatch"
    ),
    "config/check/notes:refuse_unsupported": Row(
        own_files,
        PLAN + at("method.kind", "lora") + at("method.dropout", "0.1") + at("train.compile", "true"),
        PLAN + at("method.kind", "lora") + at("method.dropout", "0.1") + at("train.compile", ""),
    ),
    "config/files/document:parse_document": Row(
        wrong_toml, "plan -p mine -r w.toml", "plan -p mine -r w.toml", right_toml
    ),
    "config/files/document:decode_utf8": Row(latin, "plan -p mine -r w.toml", "plan -p mine -r w.toml", right_toml),
    "config/files/data_files:_check_suffixes: add one source": Row(
        two_formats, DATA + at("data.sources.main.path", "'t/*'"), DATA + at("data.sources.main.path", "t/a.csv")
    ),
    "config/files/data_files:_check_suffixes: {OTHER": Row(
        no_suffix, DATA + at("data.sources.main.path", "rows.dat"), DATA + ROWS_PATH, rename_rows
    ),
    "data/folders:data_of_folder": Row(
        two_formats, DATA + at("data.sources.main.path", "t"), DATA + at("data.sources.main.path", "'t/**/*.csv'")
    ),
    "data/recognise:_unclear: set the format": Row(
        rows_of({"prompt": "1", "completion": "2", "text": "3"}), DATA + ROWS_PATH,
        DATA + ROWS_PATH + at("data.sources.main.format", "text"),
    ),
    "data/dataset_files:_open_local: add at least": Row(rows_of(), DATA + ROWS_PATH, DATA + ROWS_PATH, mend),
    "data/dataset_files:_unreadable: check that the file": Row(
        not_parquet, DATA + at("data.sources.main.path", "rows.parquet"), DATA + ROWS_PATH, named_by_its_format
    ),
    "journal/queue:_not_written": Row(
        file_as_queue, "queue add -p mine -r r.toml", "queue add -p mine -r r.toml --runs other"
    ),
    "architecture/families:own_code": Row(
        own_code, PLAN + MODEL, PLAN.replace("plan", "queue add") + MODEL + " --trust-remote-code"
    ),
    "data/order:hold_out": Row(
        rows_of({"prompt": "1", "completion": "2"}), DATA + ROWS_PATH + at("data.valid_fraction", "0.5"),
        DATA + ROWS_PATH + at("data.valid_fraction", "0.5"), more_rows,
    ),
    "model/tokenizer:_template_text": Row(
        template_of_bytes, DATA + at("model.chat_template", "bytes.jinja"), DATA + at("model.chat_template", ""),
    ),
    "checks/rules:_refuse_missing_template": Row(
        own_files, PLAN + at("model.chat_template", "none.jinja"), PLAN + at("model.chat_template", ""),
    ),
    "checks/rules:_refuse_missing_folder": Row(
        own_files, PLAN + at("model.tokenizer", "./none"), PLAN + at("model.tokenizer", "builtin:bytes")
    ),
    "architecture/model_folder:refuse_without_config: set model.id": Row(
        adapter, PLAN + at("model.id", "./adapter"),
        PLAN + at("model.id", "builtin:tiny") + at("model.adapter", "./adapter") + at("model.init", "pretrained")
        + at("method.kind", "lora"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)


RANK = {"RANK": "0", "WORLD_SIZE": "2"}
ENVIRONMENTS = {
    "launch/environment:_plain": (RANK, {"MASTER_ADDR": "127.0.0.1"}),
    "launch/environment:_number": ({"RANK": "zero", "WORLD_SIZE": "2"}, {"RANK": ""}),
    "launch/environment:require_rank_per_device": ({**RANK, "MASTER_ADDR": "127.0.0.1"}, {"WORLD_SIZE": "1"}),
    "launch/environment:_slurm": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, {"MASTER_ADDR": "127.0.0.1"}),
}


@pytest.mark.parametrize("key", ENVIRONMENTS)
def test_a_variable_that_a_fix_names_is_what_was_missing(
    key: str, tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right = ENVIRONMENTS[key]
    own_files(tmp_path)
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    assert tunedeck("train", "-p", "mine", "-r", "r.toml").code == 2
    assert was_given(text_of(key), given)
    given.clear()
    for name, value in right.items():
        monkeypatch.setenv(name, value)
    answer = tunedeck("train", "-p", "mine", "-r", "r.toml")
    assert not was_given(text_of(key), given)
    assert answer.code == 0 or given[0][0].startswith("launch/environment:"), "the next thing, if any"


FOLDERS = {"data/store:_not_writable": "TUNEDECK_CACHE"}


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_that_can_be_written_is_named_by_the_variable(
    key: str, tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_files(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDERS[key], str(tmp_path / "file" / "below"))
    assert tunedeck(*DATA.split()).code == 6
    assert was_given(text_of(key), given), given
    monkeypatch.setenv(FOLDERS[key], str(tmp_path / "folder"))
    assert tunedeck(*DATA.split()).code == 0
