"""Invalid arguments, files and data: each case ends with its exit code and one short error message that says what to
do.

The cases are a table: what is wrong, the exit code, and words that the block must hold. Runs that fail later, in the
engine, are in `test_bad_runs`.

Try: `pytest tests/cli/test_bad_input.py -k typo`
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import GOOD_DATA, RECIPE, write_profile, write_recipe

DEMO = ("-p", "demo", "-r", "demo")
SHARDS = ("-p", "demo-2", "-r", "demo", "--set", "parallel.strategy=sharded")

ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no profile, no recipe": (("train",), ("-p PROFILE and -r RECIPE", "fix: add -p demo -r demo")),
    "no recipe": (("train", "-p", "demo"), ("-r RECIPE",)),
    "plan without a profile": (("plan",), ("'--profile'", "fix: tunedeck plan -p demo -r demo")),
    "unknown command": (("frobnicate",), ("frobnicate", "fix: tunedeck --help")),
    "misspelled command": (("trian",), ("Did you mean 'train'",)),
    "misspelled command of a group": (("profiles", "lst"), ("Did you mean 'list'",)),
    "unknown option": (("train", "--bogus"), ("--bogus", "fix: tunedeck train --help")),
    "too many arguments": (("train", *DEMO, "extra"), ("extra",)),
    "option out of range": (("train", *DEMO, "--max-hours", "-1"), ("--max-hours",)),
    "option of the wrong type": (("train", *DEMO, "--wait", "soon"), ("--wait",)),
    "hours that are no number": (("train", *DEMO, "--max-hours", "nan"), ("--max-hours",)),
    "recipe and run spec at once": (("train", *DEMO, "--run-spec", "x.toml"), ("--run-spec and -r",)),
    "run spec that is not there": (("train", "--run-spec", "x.toml"), ("x.toml", "No such file")),
    "name with a slash": (("train", *DEMO, "--name", "a/b"), ("--name", "a/b", "letters")),
    "empty name": (("train", *DEMO, "--name", ""), ("--name",)),
    "name with an escape code": (("train", *DEMO, "--name", "\x1b[31mred"), ("--name", r"\x1b[31mred")),
    "devices of a profile without any": (("train", *DEMO, "--devices", "0"), ("--devices", "metered", "fix:")),
    "devices that are words": (("train", *DEMO, "--devices", "first"), ("--devices 'first'", "0 or 2,3")),
    "the same device twice": (("train", *DEMO, "--devices", "0,0"), ("different indices",)),
    "negative device": (("train", *DEMO, "--devices", "-1"), ("different indices",)),
    "more devices than the profile": (
        ("train", "-p", "24gb", "-r", "demo", "--devices", "0,1"),
        ("lists 2", "device.count = 1"),
    ),
    "misspelled recipe": (("plan", "-p", "demo", "-r", "dmeo"), ("did you mean demo?", "fix: -r demo")),
    "misspelled profile": (("plan", "-p", "dem0", "-r", "demo"), ("did you mean demo?", "fix: -p demo")),
    "recipe given as profile": (("plan", "-p", "lora", "-r", "demo"), ("there is a recipe with that name: use -r",)),
    "empty recipe name": (("plan", "-p", "demo", "-r", ""), ('no recipe named ""',)),
    "recipe path that is not there": (("plan", "-p", "demo", "-r", "./a.toml"), ("./a.toml: no such file",)),
    "set without an equals sign": (("plan", *DEMO, "--set", "train"), ("no '='", "train.learning_rate=1e-4")),
    "set without a key": (("plan", *DEMO, "--set", "=3"), ("is not a key",)),
    "set of a typo": (("plan", *DEMO, "--set", "train.batchsize=3"), ("did you mean train.batch_size?",)),
    "set of an unknown table": (("plan", *DEMO, "--set", "trian.seed=3"), ("did you mean train?",)),
    "set of another tool's name": (("plan", *DEMO, "--set", "lora_r=8"), ("method.rank = 8",)),
    "set of a whole table": (("plan", *DEMO, "--set", "train=3"), ("a table is allowed",)),
    "set of a source that is not there": (("plan", *DEMO, "--set", "data.sources.x.limit=3"), ("existing: dates",)),
    "no sequences": (("plan", *DEMO, "--set", "train.batch_size=0"), ("train.batch_size: 0", "1 or more")),
    "no tokens": (("plan", *DEMO, "--set", "data.max_length=0"), ("data.max_length: 0", "1 or more")),
    "half a sequence": (("plan", *DEMO, "--set", "train.batch_size=1.5"), ("an integer",)),
    "number in quotes": (("plan", *DEMO, "--set", 'train.learning_rate="1e-4"'), ("without quotes",)),
    "list for a number": (("plan", *DEMO, "--set", "data.max_length=[64,]"), ("[64], a list",)),
    "learning rate that is no number": (("plan", *DEMO, "--set", "train.learning_rate=nan"), ("nan",)),
    "seed above 64 bits": (("plan", *DEMO, "--set", f"train.seed={10**30}"), ("64 bits",)),
    "seed of five thousand digits": (("plan", *DEMO, "--set", "train.seed=" + "9" * 5000), ("an integer",)),
    "value nested too deeply": (("plan", *DEMO, "--set", "train.seed=" + "[" * 3000), ("an integer",)),
    "choice that is none": (("plan", *DEMO, "--set", "model.dtype=bf16"), ('did you mean "bfloat16"?',)),
    "micro-batch above the batch": (("plan", *DEMO, "--set", "train.batch_size=8"), ("micro_batch = 64", "8 or less")),
    "model folder that is not there": (("plan", *DEMO, "--set", "model.id=./gone"), ("does not exist", "model.id")),
    "built-in model that is none": (("plan", *DEMO, "--set", "model.id=builtin:tin"), ("did you mean builtin:tiny?",)),
    "a tracker that is none": (("train", *DEMO, "--set", 'trackers.use=["clearml"]'), ("trackers.use", "tensorboard")),
    "adafactor on shards, of a later version": (
        ("train", *SHARDS, "--set", "train.optimizer=adafactor"),
        ("does not support sharding with optimizers that need whole tensors",),
    ),
    "run that nobody made": (("show", "nope"), ("no run matches 'nope'", "fix: list them: tunedeck runs")),
    "run without a name": (("resume", ""), ("RUN is empty",)),
    "path that is no run": (("log", "./"), ("is not a run",)),
    "waiting for nothing": (("wait", "last"), ("no run matches 'last'",)),
    "scoring with a profile only": (("eval", "last", "-p", "demo"), ("-r RECIPE",)),
    "scoring half a model": (("eval", "builtin:tiny", "-r", "demo"), ("-p PROFILE",)),
    "negative samples": (("data", "-r", "demo", "--show", "-1"), ("--show",)),
    "profile with a climbing name": (("profiles", "new", "../x"), ("is not a valid name",)),
    "import of nothing": (("recipes", "import", "gone.toml"), ("gone.toml", "No such file")),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_bad_arguments_are_usage_errors(
    tunedeck: Tunedeck, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    tunedeck(*arguments).complains(2, *words)
    assert not (tmp_path / "runs").exists(), "nothing was started"


BAD_FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("model: missing", "data: missing")),
    "syntax": (b'schema = 1\nkind = "recipe"\nname = \n', (":3:", "not TOML")),
    "stray comma": (RECIPE.format(name="bad").replace("64", "64,").encode(), (":15:", "max_length = 64,")),
    "key given twice": (b"schema = 1\nschema = 1\n", (":2:", "already in the file")),
    "table given twice": (RECIPE.format(name="bad").encode() + b"[train]\n", ("already in the file", "[train]")),
    "newer schema": (RECIPE.format(name="bad").replace("= 1\n", "= 2\n", 1).encode(), (":1:", "update Tunedeck")),
    "several problems at once": (
        RECIPE.format(name="bad").replace("1e-3", '"1e-3"').replace("[train]", "[trian]").encode(),
        ("did you mean train?",),
    ),
    "not UTF-8": ('schema = 1\ntitle = "é"\n'.encode("latin-1"), (":2:", "0xe9", "UTF-8")),
    "UTF-16": (RECIPE.encode("utf-16"), ("UTF-16", "save the file as UTF-8")),
    "binary": (bytes(range(256)), ("UTF-8",)),
    "null byte": (b"schema = 1\n\0", (":2:", r"\x00")),
    "escape codes in a value": (
        RECIPE.format(name="bad").replace('"float32"', r'"\u001b[31mfloat32"').encode(),
        (r"\x1b[31m",),
    ),
    "escape codes in a key": (RECIPE.format(name="bad").encode() + b'"\\u001b[31mx" = 1\n', (r"\x1b[31mx",)),
    "remote code": (
        RECIPE.format(name="bad").replace("[method]", "trust_remote_code = true\n[method]").encode(),
        ("cannot allow remote code", "--trust-remote-code"),
    ),
    "profile as recipe": (b'schema = 1\nkind = "profile"\nname = "bad"\n', ("a file for -p",)),
    "huge": (b"#" * 2_000_000, ("larger than 1024 KiB",)),
    "deep lists": (b"x = " + b"[" * 3000 + b"]" * 3000, ("nested too deeply",)),
    "keys deeper than any spec": (b"a." * 150 + b"a = 1", ("nested too deeply",)),
    "deep keys": (b"a." * 3000 + b"a = 1", ("nested too deeply",)),
    "number of five thousand digits": (b"schema = " + b"9" * 5000, ("64 bits",)),
}


@pytest.mark.parametrize(("raw", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_recipe_files_name_file_and_line(
    tunedeck: Tunedeck, tmp_path: Path, raw: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / "bad.toml").write_bytes(raw)
    tunedeck("train", "-p", "demo", "-r", "bad.toml").complains(2, *words)
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_things_that_are_no_files(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link.toml").symlink_to("gone")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    os.mkfifo(tmp_path / "fifo.toml")
    expected = {"folder": "directory", "link": "no such file", "loop": "no such file", "fifo": "not a regular file"}
    for name, word in expected.items():
        tunedeck("plan", "-p", "demo", "-r", f"{name}.toml").complains(2, f"{name}.toml", word)


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "~/secrets.jsonl"])
def test_imported_recipes_cannot_point_out_of_their_folder(tunedeck: Tunedeck, tmp_path: Path, path: str) -> None:
    recipe = write_recipe(tmp_path, ("data.jsonl", path), data=None)
    tunedeck("recipes", "import", recipe).complains(2, path)


def test_escape_codes_in_a_title_are_shown_not_obeyed(tunedeck: Tunedeck, tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "recipes"
    folder.mkdir(parents=True)
    write_recipe(folder, ('name = "mine"', 'name = "mine"\ntitle = "\\u001b[31mred"'))
    listed = tunedeck("recipes", "list")
    assert r"\x1b[31mred" in listed.out and "\x1b" not in listed.out


DATA: dict[str, tuple[str | bytes | None, tuple[str, ...]]] = {
    "missing": (None, ("data.jsonl does not exist", "--set data.sources.main.path=")),
    "empty": ("", ("data.jsonl is empty",)),
    "blank lines": ("\n\n", ("no rows",)),
    "bad line": ('{"text": "a"}\n{"text": "b"}\n{"text":\n', ("data.jsonl:3: not JSON", "correct or remove that line")),
    "scalars": ("1\n2\n", ("data.jsonl:1:", "expected an object")),
    "unknown columns": ('{"foo": "a"}\n', ("columns are foo", "messages", "columns = {text")),
    "nulls": ('{"text": null}\n', ("1 x text is missing",)),
    "no text": ('{"text": ""}\n', ("1 x text is empty",)),
    "numbers for text": ('{"text": 5}\n{"text": 6}\n', ("2 x text is not text",)),
    "all masked": ('{"prompt": "a", "completion": ""}\n' * 3, ("3 x completion is empty",)),
    "all too long": ('{"prompt": "a", "completion": "' + "a" * 500 + '"}\n', ("longer than data.max_length",)),
    "not UTF-8": (b'{"text": "\xff\xfe"}\n', ("data.jsonl:1: not JSON (not UTF-8 text)",)),
    "binary": (bytes(range(256)) * 4, ("data.jsonl:1: not JSON",)),
    "conversation that is text": ('{"messages": "hello"}\n', ("not a list of turns",)),
    "turn without a role": ('{"messages": [{"who": "me"}]}\n', ("a turn has no role",)),
}


@pytest.mark.parametrize(("data", "words"), DATA.values(), ids=DATA.keys())
def test_bad_data_is_exit_5(
    tunedeck: Tunedeck, tmp_path: Path, data: str | bytes | None, words: tuple[str, ...]
) -> None:
    tunedeck("data", "-r", write_recipe(tmp_path, data=data)).complains(5, *words, "fix:")


FILES: dict[str, tuple[str, bytes, str]] = {
    "truncated csv": ("x.csv", b'a,b\n"unclosed\n', "is not closed"),
    "parquet that is none": ("x.parquet", b"text", "cannot be read"),
    "arrow that is none": ("x.arrow", b"text", "cannot be read"),
    "unknown suffix": ("x.what", b"text", "rename the file"),
    "an archive": ("x.zip", b"text", "unpack it"),
    "no suffix": ("x", b"text", "rename the file"),
}


@pytest.mark.parametrize(("name", "raw", "word"), FILES.values(), ids=FILES.keys())
def test_data_files_that_are_not_what_they_say(
    tunedeck: Tunedeck, tmp_path: Path, name: str, raw: bytes, word: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    recipe = write_recipe(tmp_path, ("data.jsonl", name), data=None)
    tunedeck("data", "-r", recipe).complains(5, name, word, "fix:")


def test_data_paths_that_are_no_files(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data=None)
    (tmp_path / "data.jsonl").symlink_to("gone")
    tunedeck("data", "-r", recipe).complains(5, "is a link to gone, which does not exist")
    (tmp_path / "data.jsonl").unlink()
    os.mkfifo(tmp_path / "data.jsonl")
    tunedeck("data", "-r", recipe).complains(5, "neither a file nor a folder")
    (tmp_path / "data.jsonl").unlink()
    (tmp_path / "data.jsonl").mkdir()
    tunedeck("data", "-r", recipe).complains(5, "has no files")


def test_validation_that_leaves_nothing(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data=GOOD_DATA.splitlines(keepends=True)[0])
    tunedeck("data", "-r", recipe, "--set", "data.valid_fraction=0.5").complains(5, "nothing to train on", "fix:")
    tunedeck("data", "-r", recipe, "--set", "eval.at_start=true").complains(2, "validation data is needed")


def test_hub_data_without_a_network_is_exit_6(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ('path = "data.jsonl"', 'hub = "nobody/nothing"'))
    tunedeck("data", "-r", recipe).complains(
        6, "nobody/nothing", "hub cannot be reached", "fix: connect to the network, or download"
    )


def test_a_hub_model_without_a_network_is_exit_6(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ("builtin:tiny", "nobody/nothing"))
    tunedeck("plan", "-p", "demo", "-r", recipe).complains(6, "nobody/nothing", "fix:", "hf download")


def test_a_missing_file_is_told_before_the_hub_is_asked_for_anything(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ("builtin:tiny", "nobody/nothing"), data=None)
    outcome = tunedeck("train", "-p", "demo", "-r", recipe)
    assert outcome.code == 5 and "data.jsonl does not exist" in outcome.err


@pytest.mark.parametrize("kind", ["a file", "not to be made"])
def test_a_cache_that_cannot_be_written_is_exit_6(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "file") if kind == "a file" else "/proc/cache")
    tunedeck("data", "-r", write_recipe(tmp_path)).complains(6, "cannot be written", "TUNEDECK_CACHE")


def test_a_runs_folder_that_is_a_file_is_exit_6(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    tunedeck("train", *DEMO).complains(6, "no run directory can be created", "--runs DIR")


def test_what_does_not_fit_is_exit_3(tunedeck: Tunedeck, tmp_path: Path) -> None:
    small = write_profile(tmp_path, ('"cpu"', '"metered"'), ("8.0", "0.001"), name="small")
    tunedeck("train", "-p", small, "-r", write_recipe(tmp_path)).complains(3, "does not fit", "--force trains anyway")
    assert not (tmp_path / "runs").exists()
