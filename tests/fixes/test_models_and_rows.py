"""Fixes about models' folders and data files: what they say is set or mended, and the same command then goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.budget.advise.plan import find_predictor
from engine.config.load import resolve
from engine.errors import NotSimulatedError
from tests.budget.metered_step import folder_of
from tests.budget.test_simulated import SHALLOW
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile
from tests.cli.test_fixes import own_files
from tests.cli.test_gate import LLAMA
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, State, text_of, walk
from tests.fixes.test_chat_and_data import LABELLED
from tests.fixes.test_settings import DATA, MODEL, PLAN, ROWS_PATH, at, model_of, rows_of
from tests.vision_models import make_tokenizer, write_qwen2_vl

KINDS = {"lora": at("method.kind", "lora"), "dpo": at("method.objective", "dpo")}
LORA = PLAN + MODEL + KINDS["lora"]
TARGETS = LORA + " --set 'method.targets={}'"
ALL_LINEAR = LORA + at("method.targets", "all-linear")
PLAIN = at("model.tokenizer", "./plain")
SKIP = at("data.broken", "skip")
PRETRAINED = at("model.init", "pretrained")
FOLDER_MODEL = PLAN + at("model.id", "./model") + at("model.tokenizer", "")
TURNS = [{"role": "user", "content": "1 plus 1"}, {"role": "assistant", "content": "2"}]


def sees(folder: Path) -> None:
    own_files(folder)
    write_qwen2_vl(folder / "model")


def without_padding(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    del config["pad_token_id"]
    (folder / "model" / "config.json").write_text(json.dumps(config))


def quantised(method: str) -> State:
    def state(folder: Path) -> None:
        model_of(quantization_config={"quant_method": method})(folder)
        (folder / "README.md").write_text("")
        (folder / "model" / "README.md").write_text("---\nbase_model: ./whole\n---\n")
        (folder / "whole").mkdir()
        (folder / "whole" / "config.json").write_text(json.dumps(LLAMA))

    return state


def small_machine(folder: Path) -> None:
    own_files(folder)
    write_profile(folder / "profiles" / "hardware", ("memory_gib = 8.0", "memory_gib = 0.0001"), name="small")


def null_among_rows(folder: Path) -> None:
    own_files(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\nnull\n')


def unknown_token(folder: Path) -> None:
    own_files(folder)
    rows = [{"input_ids": [65, 66]}, {"input_ids": [65, 999_999]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def two_tables_of_images(folder: Path) -> None:
    from PIL import Image

    sees(folder)
    for name in ("train", "more"):
        (folder / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (56, 56)).save(folder / "pictures" / name / "a.png")
        (folder / "pictures" / name / "metadata.csv").write_text("file_name,prompt,completion\na.png,1,2\n")


def conversations(folder: Path) -> None:
    rows_of(*[{"messages": TURNS}] * 4)(folder)
    make_tokenizer((), "").save_pretrained(folder / "plain")


def own_template(folder: Path) -> None:
    (folder / "my_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def judged(folder: Path) -> None:
    rows_of(*[{"question": "1 plus 1", "answer": "2", "good": True}] * 4)(folder)


ROWS = {
    "budget/advise/model_rules:refuse_patterns": Row(
        sees, FOLDER_MODEL + at("method.train_only", "[\\\"model.visual\\\"]"),
        FOLDER_MODEL + at("method.train_only", "[\\\"model.language_model\\\"]"),
    ),
    "architecture/families:_refuse_reset": Row(
        model_of(model_type="youtu", pad_token_id=0), PLAN + MODEL, PLAN + MODEL, without_padding
    ),
    "architecture/families:_refuse_targets": Row(
        model_of(model_type="mamba"), LORA + at("method.targets", "attention"), ALL_LINEAR
    ),
    "architecture/families:no_adapter_on": Row(
        model_of(model_type="mamba"), LORA + at("method.targets", "[\\\"x_proj\\\"]"), ALL_LINEAR
    ),
    "architecture/model_folder:refuse_quantised: {instead}; model": Row(
        quantised("gptq"), PLAN + MODEL + PRETRAINED, PLAN + MODEL + PRETRAINED + at("model.id", "./whole")
    ),
    "architecture/model_folder:refuse_quantised: {instead}": Row(
        quantised("fp8"), PLAN + MODEL + PRETRAINED, PLAN + MODEL + PRETRAINED + at("model.id", "./whole")
    ),
    "architecture/model_folder:_refuse_tokenizer: set model.tokenizer": Row(
        model_of(), FOLDER_MODEL, FOLDER_MODEL + at("model.tokenizer", "builtin:bytes")
    ),
    "extras/chat/sources:require_room: chat with fewer": Row(
        small_machine, "chat builtin:tiny -p small --prompt x --plain", "chat builtin:tiny -p mine --prompt x --plain"
    ),
    "commands/plan:_write": Row(
        small_machine, "advise -p small -r r.toml --write x.toml", "advise -p small -r r.toml",
        answer="does not fit", code=3,
    ),
    "commands/train:engine_process": Row(own_files, "_engine ./d", "train -p mine -r r.toml"),
    "data/file_rows:_refusal": Row(null_among_rows, DATA + ROWS_PATH, DATA + ROWS_PATH + SKIP),
    "data/tokenise:_tokens": Row(
        unknown_token, DATA + ROWS_PATH, DATA + ROWS_PATH + SKIP, answer="1 sequence",
    ),
    "data/dataset_files:_no_such_split: add --set": Row(
        own_files, DATA + at("data.sources.main.split", "test"), DATA + at("data.sources.main.split", "train"),
    ),
    "data/folders:table_of_images": Row(
        two_tables_of_images, DATA + at("data.sources.main.path", "pictures"),
        DATA + at("data.sources.main.path", "pictures/train/metadata.csv"),
    ),
    "data/chat_template:find_template": Row(
        conversations, DATA + ROWS_PATH + PLAIN,
        DATA + ROWS_PATH + PLAIN + at("model.chat_template", "my_template.jinja"), own_template,
    ),
    "data/preferences:other_objective: set": Row(
        judged, DATA + ROWS_PATH + KINDS["dpo"] + at("preference.loss", "kto"),
        DATA + ROWS_PATH + KINDS["dpo"] + at("preference.loss", "kto")
        + " --set 'data.sources.main.columns={prompt=\"question\", completion=\"answer\", label=\"good\"}'",
    ),
    "data/preferences:other_objective: {'set": Row(
        rows_of(*LABELLED), DATA + ROWS_PATH + KINDS["dpo"],
        DATA + ROWS_PATH + KINDS["dpo"] + at("preference.loss", "kto"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)


WALKED = ("errors:__init__",)
"""The fix texts that the test below executes."""


def test_a_model_without_a_closed_form_is_simulated_by_plan(
    tunedeck: Tunedeck, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_files(tmp_path)
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    folder = folder_of(SHALLOW, tmp_path / "opt")
    options = (f"model.id={folder}", "model.tokenizer=builtin:bytes")
    spec = resolve("mine", "r.toml", options).spec
    with pytest.raises(NotSimulatedError) as caught:
        find_predictor(spec)
    assert caught.value.fix == text_of("errors:__init__").text
    assert tunedeck(*PLAN.split(), *(word for each in options for word in ("--set", each))).code == 0
    assert find_predictor(spec) is not None
