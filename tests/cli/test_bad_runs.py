"""Runs that cannot start or continue, and requests that a run cannot fulfil: each ends with its exit code and one error
message, and no failed run looks complete.

The runs are real: tiny, on the CPU, in engine processes of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.journal.liveness import claim
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_profile, write_recipe

QWEN2 = json.dumps(
    {
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the copy of the finished run; the fixture `finished` creates it once."""
    return tmp_path_factory.mktemp("finished") / "kept"


@pytest.fixture
def finished(tunedeck: Tunedeck, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a finished run of two steps. The run is made once. For every test it is restored at the path
    where it was made, with the files around it, because runs record the paths of their files."""
    folder = kept.with_name("here")
    if kept.exists():
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TUNEDECK_RUNS", str(folder / "runs"))
    monkeypatch.setenv("TUNEDECK_STATE", str(folder / "state"))
    if not kept.exists():
        outcome = tunedeck("train", "-p", write_profile(folder), "-r", write_recipe(folder), "--json")
        assert outcome.code == 0, outcome.err
        events = [json.loads(line) for line in outcome.out.splitlines()]
        assert events[-1]["kind"] == "run_finished"
        shutil.copytree(folder, kept)
    return next((folder / "runs").iterdir())


def test_a_finished_run_answers_what_it_cannot_do(tunedeck: Tunedeck, finished: Path) -> None:
    tunedeck("resume", "last").complains(2, "fix:")
    tunedeck("resume", "last", "--set", "train.max_steps=4", "--set", "train.seed=9").complains(2, "train.seed")
    tunedeck("resume", "last", "--set", "train.max_steps=4", "--from", "77").complains(2, "77")
    tunedeck("stop", "last").complains(2, "fix:")
    tunedeck("eval", "last", "--checkpoint", "77").complains(2, "77", "one of: 2, 1")
    tunedeck("eval", "last").complains(5, "no data to score on", "fix:")
    assert tunedeck("wait", "last").code == 0
    shown = json.loads(tunedeck("show", "last", "--json").out)
    keys = "run status step max_steps metrics backoffs samples_lost predicted measured result"
    assert set(keys.split()) <= shown.keys()
    assert (shown["status"], shown["step"], shown["samples_lost"]) == ("done", 2, 0)


def test_a_finished_run_goes_on_when_it_is_made_longer(tunedeck: Tunedeck, finished: Path) -> None:
    assert tunedeck("resume", "last", "--set", "train.max_steps=4").code == 0
    assert json.loads(tunedeck("show", "last", "--json").out)["step"] == 4


def test_damaged_checkpoints_everywhere_mean_starting_over_and_saying_so(tunedeck: Tunedeck, finished: Path) -> None:
    for weights in finished.glob("checkpoints/*/weights/model.safetensors"):
        weights.write_bytes(b"damaged")
    outcome = tunedeck("resume", "last", "--set", "train.max_steps=3")
    assert outcome.code == 0
    assert "is damaged" in outcome.out
    assert "from the beginning" in outcome.out


def test_data_that_is_gone_at_resume_is_exit_5(tunedeck: Tunedeck, finished: Path) -> None:
    Path("data.jsonl").unlink()
    outcome = tunedeck("resume", "last", "--set", "train.max_steps=4")
    assert outcome.code == 5
    assert "data.jsonl does not exist" in outcome.err


def test_two_engines_on_one_run_are_exit_6(tunedeck: Tunedeck, tmp_path: Path) -> None:
    place = make_run(tmp_path, write_recipe(tmp_path))
    with claim(place):
        tunedeck("resume", place.path).complains(6, "fix:")


def test_a_missing_gpu_is_exit_6(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    outcome = tunedeck("train", "-p", "24gb", "-r", recipe)
    assert outcome.code == 6
    assert "fix:" in outcome.err
    assert not list(tmp_path.glob("runs/*/model"))


def test_a_loss_that_is_not_finite_is_exit_7_and_leaves_no_result(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ("learning_rate = 1e-3", "learning_rate = 1e30\nmax_grad_norm = 0.0"))
    outcome = tunedeck("train", "-p", write_profile(tmp_path), "-r", recipe, "--set", "train.max_steps=4")
    assert outcome.code == 7
    assert "not applied" in outcome.err and "learning_rate" in outcome.err
    assert not list(tmp_path.glob("runs/*/model"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "full"', 'kind = "lora"\ntargets = ["q_porj"]', ("q_porj", "q_proj")),
        ('kind = "full"', 'kind = "full"\ntrain_only = ["model.layers.9.*"]', ("model.layers.9",)),
        ('kind = "full"', 'kind = "full"\nfreeze = ["nothing.like.it"]', ("nothing.like.it",)),
    ],
)
def test_patterns_that_match_nothing_are_exit_2(
    tunedeck: Tunedeck, tmp_path: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    outcome = tunedeck("train", "-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, (old, new)))
    assert outcome.code == 2, outcome.err
    assert all(word in outcome.err for word in words), outcome.err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is empty"),
        ({"config.json": '{"model_type": "vit"}'}, "causal"),
        ({"config.json": QWEN2}, "safetensors"),
        ({"config.json": QWEN2, "pytorch_model.bin": "x"}, "safetensors"),
        ({"config.json": "{broken"}, "config.json"),
    ],
)
def test_folders_that_are_no_models_are_refused(
    tunedeck: Tunedeck, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    (tmp_path / "base").mkdir()
    for name, text in files.items():
        (tmp_path / "base" / name).write_text(text)
    recipe = write_recipe(tmp_path, ('"builtin:tiny"', '"./base"'), ('init = "random"\n', ""))
    outcome = tunedeck("train", "-p", write_profile(tmp_path), "-r", recipe, "--force")
    assert outcome.code in (2, 6), outcome.err
    assert words in outcome.err, outcome.err
    assert "Traceback" not in outcome.err
    assert not list(tmp_path.glob("runs/*/model"))
