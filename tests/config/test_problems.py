"""Every problem of a file is reported at once, with file, line, key, what was found and what is allowed.

The table holds broken files; each row names the line to blame and words that must be in its message.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import tomlkit

from engine.config.files.find import SpecFile
from engine.config.load import load_spec_file, name_note, resolve
from engine.config.schema.recipe import Recipe
from engine.errors import SpecError

RECIPE = """schema = 1
kind = "recipe"
name = "broken"
[model]
id = "Qwen/Qwen2.5-0.5B"
{model}
[method]
{method}
[train]
{train}
[data]
{data}
[[data.sources]]
name = "main"
path = "train.jsonl"
{source}
"""
"""Line of each slot: model 6, method 8, train 10, data 12, source 16."""

LINES = {"model": 6, "method": 8, "train": 10, "data": 12, "source": 16}

BROKEN: list[tuple[str, str, int, list[str]]] = [
    (
        "train",
        'learning_rate = "1e-4"',
        10,
        ["train.learning_rate", '"1e-4" is text', "without quotes", "a number, above 0"],
    ),
    ("model", 'tokenizer = "run:last@-1"', 6, ["model.tokenizer", 'checkpoint by "-1"', "run:RUN@STEP"]),
    ("model", 'adapter = "run:last@1e9"', 6, ["model.adapter", '"1e9"', "run:RUN@best"]),
    ("model", 'adapter = "run:@best"', 6, ["model.adapter", "does not name a run"]),
    ("train", "max_steps = [100]", 10, ["train.max_steps", "[100]", "a list", "an integer"]),
    ("train", "batch_size = 2.5", 10, ["train.batch_size", "2.5", "an integer, 1 or more"]),
    ("train", "batch_size = 0", 10, ["train.batch_size", "1 or more"]),
    ("train", "batch_size = true", 10, ["train.batch_size", "true", "an integer"]),
    ("train", "epochs = -1", 10, ["train.epochs", "-1", "above 0"]),
    ("train", "epochs = inf", 10, ["train.epochs", "inf"]),
    ("train", "warmup_ratio = 1.5", 10, ["train.warmup_ratio", "at most 1"]),
    ("train", "label_smoothing = nan", 10, ["train.label_smoothing", "nan"]),
    ("train", "betas = [0.9]", 10, ["train.betas", "at least 2"]),
    ("train", "betas = [0.9, 1.0]", 10, ["train.betas.1", "below 1"]),
    ("train", 'compile = "true"', 10, ["train.compile", "true or false"]),
    ("train", "compile = 1", 10, ["train.compile", "true or false"]),
    ("train", 'micro_batch = "all"', 10, ["train.micro_batch", '"auto"', "an integer"]),
    ("train", "seed = 2026-11-20", 10, ["train.seed", "a date"]),
    ("train", "learning_rat = 1e-4", 10, ["unknown key", "did you mean train.learning_rate?"]),
    ("train", "rank = 8", 10, ["train.rank", "unknown key here", "belongs in method.rank"]),
    ("train", "zzzz = 8", 10, ["unknown key", "allowed here: epochs, max_steps"]),
    ("train", 'optimizer = "adamw_torch"', 10, ['"adamw_torch"', 'did you mean "adamw"?']),
    ("train", 'scheduler = "cosin"', 10, ['did you mean "cosine"?']),
    (
        "train",
        "per_device_train_batch_size = 4\ngradient_accumulation_steps = 8",
        10,
        ["train.micro_batch = 4, train.batch_size = 32"],
    ),
    (
        "train",
        "per_device_train_batch_size = 4\ngradient_accumulation_steps = 8",
        11,
        ["train.micro_batch = 4, train.batch_size = 32"],
    ),
    ("train", "num_train_epochs = 3", 10, ["Hugging Face Trainer", "train.epochs = 3"]),
    ("train", 'lr_scheduler_type = "constant_with_warmup"', 10, ['train.scheduler = "constant"']),
    ("train", 'deepspeed = "ds_z3_config.json"', 10, ['parallel.strategy = "sharded", parallel.shard = "parameters"']),
    ("train", 'deepspeed = "configs/zero2.json"', 10, ['parallel.strategy = "sharded", parallel.shard = "gradients"']),
    ("train", "deepspeed = {zero_optimization = {stage = 2}}", 10, ['parallel.shard = "gradients"']),
    ("train", "zero_stage = 3", 10, ["DeepSpeed", 'parallel.shard = "parameters"']),
    ("train", "warmup_steps = 5\nwarmup_ratio = 0.1", 11, ["both warmup_ratio and warmup_steps"]),
    ("train", "min_learning_rate = 1.0", 10, ["above learning_rate = 0.0002"]),
    ("train", "micro_batch = 32", 10, ["micro_batch = 32 is above batch_size = 16", "effective batch"]),
    ("train", "restarts = 3", 10, ["cosine_with_restarts"]),
    ("train", "power = 2.0", 10, ['scheduler = "polynomial" is needed']),
    ("train", "decay_ratio = 0.2", 10, ['scheduler = "wsd" is needed']),
    ("train", "momentum = 0.9", 10, ['optimizer = "sgd"']),
    ("train", 'groups = [{match = "**"}]', 10, ["train.groups.0", "does not set anything"]),
    ("method", 'kind = "qlora"', 8, ['method.kind = "lora" with model.quantize = "nf4"']),
    ("method", "lora_r = 64", 8, ["Axolotl", "method.rank = 64"]),
    ("method", 'target_modules = ["q_proj"]', 8, ["peft", 'method.targets = ["q_proj"]']),
    ("method", "targets = [1]", 8, ["method.targets.0", "text"]),
    ("method", "targets = []", 8, ["no module gets an adapter"]),
    ("method", 'kind = "full"\nexclude = ["q_proj"]', 9, ["exclude", 'method.kind = "lora" is needed']),
    ("method", 'kind = "full"\ntargets = "attention"', 9, ["targets", 'method.kind = "lora" is needed']),
    ("method", 'train_only = ["**"]', 8, ['method.kind = "full" is needed']),
    ("method", 'kind = "full"\nrslora = true', 9, ["rslora", 'method.kind = "lora" is needed']),
    ("method", 'kind = "full"\nalso_train = ["**"]', 9, ["also_train", "train_only"]),
    ("model", 'dtype = "bf16"', 6, ['did you mean "bfloat16"?']),
    ("model", "load_in_4bit = true", 6, ['model.quantize = "nf4"']),
    ("model", "trust_remote_code = true", 6, ["a file cannot allow remote code", "--trust-remote-code"]),
    ("model", 'tokenizer = "builtin:byte"', 6, ["not a built-in name", "builtin:bytes"]),
    ("model", 'revision = "\\u001b[31mmain"', 6, ["model.revision", "\\x1b", "control character"]),
    ("data", "max_seq_length = 512", 12, ["TRL", "data.max_length = 512"]),
    ("data", "valid_fraction = 1.0", 12, ["below 1"]),
    ("data", "image_min_pixels = 9\nimage_max_pixels = 4", 12, ["9 above image_max_pixels = 4"]),
    (
        "data",
        "valid_fraction = 0.1\nvalidation = [{name = 'v', path = 'v.jsonl'}]",
        12,
        ["together with [[data.validation]]"],
    ),
    ("source", 'hub = "owner/name"', 16, ["data.sources.main.hub", "both path", "one of them"]),
    ("source", 'config = "en"', 16, ["config without hub"]),
    ("source", "enabled = false", 16, ["every source is disabled"]),
    ("source", 'format = "chatml"', 16, ['did you mean "chat"?']),
    ("source", 'columns = ["a"]', 16, ["data.sources.main.columns", "a table"]),
    ("source", "weight = 0", 16, ["above 0"]),
    ("source", '[[data.sources]]\nname = "main"\npath = "b"', 17, ['"main" twice']),
    ("source", '[[data.sources]]\npath = "b"', 16, ["data.sources.1.name", "missing", 'name = "main"']),
    ("source", '[[data.sources]]\nname = "other"', 16, ["neither path nor hub"]),
    ("source", '[[data.sources]]\nname = "Other"\npath = "b"', 17, ["lower-case letters"]),
    ("source", "[eval]\nevery_steps = 10", 17, ["eval.every_steps", "without validation data"]),
    ("source", "[eval]\nearly_stopping_patience = 2", 17, ["without validation data"]),
    ("source", '[eval]\nmetrics = ["exact_match"]', 17, ["exact_match without validation data"]),
    ("source", '[checkpoint]\nbest_metric = "rouge"', 17, ['"rouge" is not evaluated']),
    ("source", '[backoff]\nladder = ["cut", "cut"]', 17, ['"cut" twice']),
    ("source", '[sweep]\n"train.learning_rate" = [1e-4, "x"]', 17, ['"x" is text']),
    ("source", '[[stages]]\nname = "a"\nfrom = "b"', 18, ["not an earlier stage"]),
    ("source", '[[stages]]\nname = "a"\ntrain = {epochs = "x"}', 18, ["stages.a.train.epochs", '"x" is text']),
    ("source", "[checkpoint]\nsteps = 2", 17, ["did you mean checkpoint.every_steps?"]),
    ("source", "[trian]\nepochs = 1", 16, ["did you mean train?"]),
]


def check(path: Path, kind: Literal["profile", "recipe"] = "recipe") -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec_file(kind, SpecFile(path, "path", path.parent))
    assert caught.value.exit_code == 2
    return caught.value.problems


def write(tmp_path: Path, text: str, name: str = "broken") -> Path:
    path = tmp_path / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("slot", "text", "line", "words"), BROKEN, ids=[row[1][:40] for row in BROKEN])
def test_a_broken_key_is_answered_with_line_and_remedy(
    tmp_path: Path, slot: str, text: str, line: int, words: list[str]
) -> None:
    path = write(tmp_path, RECIPE.format(**{**dict.fromkeys(LINES, "#"), slot: text}))
    problems = check(path)
    at_line = [problem for problem in problems if problem.startswith(f"{path}:{line}: ")]
    assert len(at_line) == 1, problems
    assert [word for word in words if word not in at_line[0]] == []


def test_the_empty_frame_of_the_table_is_sound(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE.format(**dict.fromkeys(LINES, "#")))
    assert load_spec_file("recipe", SpecFile(path, "path", tmp_path)).model_fields_set


def test_all_problems_of_a_file_come_at_once_in_its_order(tmp_path: Path) -> None:
    slots = {
        "model": 'dtype = "bf16"',
        "method": "rnk = 1",
        "train": 'seed = "a"',
        "data": "lr = 2",
        "source": "hub = 'a/b'",
    }
    path = write(tmp_path, RECIPE.format(**slots))
    assert [int(problem.split(":")[1]) for problem in check(path)] == sorted(LINES.values())


def test_rules_across_fields_are_checked_beside_wrong_types(tmp_path: Path) -> None:
    text = RECIPE.format(**{**dict.fromkeys(LINES, "#"), "model": "dtype = 1", "train": "micro_batch = 99"})
    problems = check(write(tmp_path, text))
    assert len(problems) == 2
    assert "model.dtype" in problems[0]
    assert "micro_batch = 99 is above batch_size" in problems[1]


def test_missing_tables_are_named_with_an_example(tmp_path: Path) -> None:
    problems = "\n".join(check(write(tmp_path, 'schema = 1\nkind = "recipe"\nname = "broken"\n')))
    assert 'model: missing; a table is needed, such as [model] with id = "Qwen/Qwen2.5-0.5B-Instruct"' in problems
    assert "data: missing" in problems
    assert "[[data.sources]]" in problems


PROFILES = [
    ('kind = "cuda"\nmemory_gib = 8.0\nreserve_gib = 9.0', 7, "nothing is left"),
    ('kind = "gpu"\nmemory_gib = 8.0', 5, 'did you mean "cuda"?'),
    ('kind = "cuda"', 4, "memory_gib = 23.6"),
    ('kind = "cuda"\nmemory_gib = 0', 6, "above 0"),
    ('kind = "cuda"\nmemory_gib = 8.0\ncount = 2\n[parallel]\nstrategy = "single"', 9, '"single" with 2'),
    ('kind = "cpu"\nmemory_gib = 8.0\nallocator = "x"', 7, 'kind = "cuda" is needed'),
    ('kind = "cpu"\nmemory_gib = 8.0\n[parallel]\nstrategy = "ddp"', 8, 'did you mean "replicated"?'),
    ('kind = "cpu"\nmemory_gib = 8.0\n[parallel]\nstrategy = "deepspeed"', 8, 'did you mean "sharded"?'),
    ('kind = "cpu"\nmemory_gib = 8.0\n[parallel]\nsequence = 3', 8, "a divisor of 1"),
    ('kind = "cpu"\nmemory_gib = 8.0\n[overrides.model]\ndtype = "bf16"', 8, 'did you mean "bfloat16"?'),
    ('kind = "cpu"\nmemory_gib = 8.0\n[overrides.train]\nlearning_rat = 1', 8, "did you mean train.learning_rate?"),
    ('kind = "cpu"\nmemory_gib = 8.0\n[overrides]\nname = "x"', 8, "tables of a recipe are allowed"),
]


@pytest.mark.parametrize(("device", "line", "words"), PROFILES)
def test_a_broken_profile_is_answered_with_line_and_remedy(tmp_path: Path, device: str, line: int, words: str) -> None:
    path = write(tmp_path, f'schema = 1\nkind = "profile"\nname = "broken"\n[device]\n{device}\n')
    problems = check(path, "profile")
    blamed = [problem for problem in problems if f"{path}:{line}: " in problem]
    assert any(words in problem for problem in blamed), problems


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = 1\nb = \n", ":2: not TOML"),
        (b"a = 1\na = 2\n", ":2: a key or table that is already in the file"),
        (b"[x\n", ":1: not TOML"),
        (b"a = 262144,\n", ":1: not TOML"),
        (b"a = 1\n\nb = '\xff'\n", ":3: byte 0xff is not UTF-8"),
        ("a = 1".encode("utf-16"), ":1: UTF-16 text"),
        (b"#" * (1 << 20) + b"##", "larger than 1024 KiB"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b'a = "\x1b[31m"\n', ":1: not TOML"),
        (b"", "missing"),
        (b"schema = 2\nunknown = 1\n", ":1: schema: 2; this version of Tunedeck reads schema 1: the file is newer"),
        (b'kind = "profile"\n', ':1: kind: "profile", a file for -p; "recipe" is needed here'),
    ],
)
def test_what_is_not_a_recipe_at_all_is_refused_with_its_reason(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    problems = check(path)
    assert any(words in problem for problem in problems), problems
    assert not any("\x1b" in problem for problem in problems)


def test_a_folder_a_fifo_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    words = {"fifo.toml": "not a regular file", "folder.toml": "cannot be read", "gone.toml": "cannot be read"}
    for name, reason in words.items():
        assert reason in check(tmp_path / name)[0]


def test_the_name_may_be_left_out_and_the_files_name_counts(tmp_path: Path) -> None:
    text = RECIPE.format(**dict.fromkeys(LINES, "#"))
    for path in (write(tmp_path, text, "other"), write(tmp_path, text.replace('name = "broken"', "#"), "bare")):
        file = SpecFile(path, "path", tmp_path)
        recipe = load_spec_file("recipe", file)
        assert isinstance(recipe, Recipe) and recipe.name == path.stem
        assert resolve("demo", str(path)).spec.name == path.stem
    assert name_note(SpecFile(path, "path", tmp_path)) is None
    path = tmp_path / "other.toml"
    assert name_note(SpecFile(path, "path", tmp_path)) == (
        f'{path}:3: name: "broken" is not used; the name is that of the file: "other"'
    )


def test_a_file_whose_own_name_cannot_be_one_needs_a_name_inside(tmp_path: Path) -> None:
    text = RECIPE.format(**dict.fromkeys(LINES, "#"))
    assert resolve("demo", str(write(tmp_path, text, "My recipe (1)"))).spec.name == "broken"
    (problem,) = check(write(tmp_path, text.replace('name = "broken"', "#"), "My recipe (1)"))
    assert (
        'name: missing, and the file name "My recipe (1)" is not a valid name' in problem
        and "rename the file" in problem
    )
    assert "lower-case letters" in check(write(tmp_path, text.replace('"broken"', '"Broken"'), "fine"))[0]


def _tables(node: Any) -> list[dict[str, Any]]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return ([node] if isinstance(node, dict) else []) + [table for child in inner for table in _tables(child)]


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    "",
    "x",
    "\x1b[31m",
    [],
    [1],
    [[]],
    {},
    {"x": {}},
    [{}],
    [{"name": 3}],
]


@pytest.mark.parametrize("seed", range(300))
def test_no_damage_to_a_file_escapes_the_checker(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    data = resolve("demo", chance.choice(["demo", "lora"])).spec.recipe.model_dump(by_alias=True, exclude_none=True)
    data["stages"] = [{"name": "a", "train": {"seed": 1}}]
    data["sweep"] = {"train.seed": [1, 2]}
    for _ in range(chance.randint(1, 4)):
        table = chance.choice(_tables(data))
        key = chance.choice([*table, "surprise", "lr", "gradient_accumulation_steps"])
        value = copy.deepcopy(chance.choice(STRANGE))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    path = write(tmp_path, tomlkit.dumps(data))
    try:
        load_spec_file("recipe", SpecFile(path, "path", tmp_path))
    except SpecError as error:
        assert all(problem.startswith(str(path)) and problem.isprintable() for problem in error.problems), (
            error.problems
        )
