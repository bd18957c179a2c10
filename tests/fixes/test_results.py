"""Fixes about the results of a finished run, such as weights, merges, scores and archives."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.load import load_run_spec
from engine.config.schema.finish import Finish
from engine.config.schema.recipe import Model
from engine.data.prepare import prepare_data
from engine.device.open import open_device
from engine.errors import TunedeckError
from engine.evaluate.run import with_overrides
from engine.extras.stages.assemble import _layer_means
from engine.journal.archive import export_run
from engine.journal.directory import RunDirectory
from engine.launch.destinations import webhook_url
from engine.model.load import load_model
from engine.model.reference import find_run_weights, find_starting_weights
from engine.model.tokenizer import load_tokenizer
from tests.cli.conftest import Tunedeck
from tests.cli.test_fixes import own_files, suggested
from tests.export.test_assemble import assembled, dense
from tests.fixes.conftest import Given
from tests.fixes.rows import Row, text_of, walk, was_given
from tests.handover.test_push import base_of, finished, made
from tests.train.run_helpers import make_spec

__all__ = ["finished", "made"]

WALKED = (
    "launch/resume_run:_refuse_lost_checkpoints",
    "model/reference:find_run_weights", "model/reference:_result", "model/reference:_checkpoint: add a step",
    "model/reference:_checkpoint: correct it", "model/reference:find_starting_weights: set model.init",
    "model/reference:find_starting_weights: remove one", "model/reference:base_of_adapter",
    "model/reference:_adapter_config", "model/reference:_local", "evaluate/run:with_overrides: leave it out",
    "evaluate/run:with_overrides: add --set evaluate",
    "extras/handover/merge:merge: choose another folder", "extras/handover/merge:merge: leave out --onto",
    "journal/archive:import_run",
    "journal/archive:_refusal", "journal/score_groups:_nothing_to_compare: tunedeck eval {(runs",
    "launch/destinations:webhook_url",
    "extras/handover/merge:_require_space: free space", "extras/stages/assemble:_checked_config: set finish.merge",
    "extras/stages/assemble:_checked_config: change `from`", "extras/stages/assemble:_layer_means",
    "data/preferences:other_objective: to score it",
    "evaluate/run:_data_to_score_on", "journal/score_groups:_nothing_to_compare: tunedeck eval {runs}",
)  # fmt: skip
"""The fix texts that the tests below execute."""


PLAIN = {"revision": None, "adapter": None, "init": "pretrained"}

ROWS = {
    "journal/directory:create_run_directory": Row(
        own_files, "queue add -p mine -r r.toml --runs d/rows.jsonl/x", "queue add -p mine -r r.toml --runs other"
    ),
}


@pytest.mark.parametrize(("key", "row"), ROWS.items(), ids=ROWS)
def test_what_a_fix_says_is_right(key: str, row: Row, tunedeck: Tunedeck, tmp_path: Path, given: Given) -> None:
    walk(key, row, tunedeck, tmp_path, given)


def test_weights_are_named_as_the_fixes_say(finished: RunDirectory, given: Given) -> None:
    run = f"run:{finished.path}"

    def refused(text: str, key: str) -> str:
        with pytest.raises(TunedeckError) as caught:
            find_run_weights(text)
        assert was_given(text_of(key), given), given
        return caught.value.fix

    steps = refused(f"{run}@7", "model/reference:find_run_weights").partition(": ")[2].split(", ")
    assert {find_run_weights(f"{run}@{step}").parent.parent for step in steps} == {finished.checkpoints}
    refused(f"{run}@best", "model/reference:_checkpoint: add a step")
    refused(f"{run}@x", "model/reference:_checkpoint: correct it")
    assert find_run_weights(run) == finished.adapter
    shutil.rmtree(finished.adapter)
    named = refused(run, "model/reference:_result").removeprefix("add one, such as ")
    assert find_run_weights(named).is_dir()


def test_an_adapter_is_put_on_its_base_as_the_fixes_say(finished: RunDirectory, tmp_path: Path, given: Given) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(finished.adapter, folder)
    base = base_of(finished)
    file = folder / "adapter_config.json"
    whole = json.loads(file.read_text()) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(whole))

    def refused(key: str, **model: Any) -> str:
        with pytest.raises(TunedeckError) as caught:
            find_starting_weights(
                Model.model_construct(**{"revision": None, "adapter": None, "init": "pretrained", **model})
            )
        assert was_given(text_of(key), given), given
        return caught.value.fix

    refused("model/reference:find_starting_weights: set model.init", id=str(folder), init="random")
    assert find_starting_weights(Model(id=str(folder), init="pretrained")).base == base
    refused("model/reference:find_starting_weights: remove one", id=str(folder), adapter=str(folder))
    assert find_starting_weights(Model(id=base, adapter=str(folder))).adapter == str(folder)
    file.write_text(json.dumps({**whole, "base_model_name_or_path": None}))
    fix = refused("model/reference:base_of_adapter", id=str(folder))
    assert fix == f"set model.id to the base, and model.adapter to {folder}"
    assert find_starting_weights(Model(id=base, adapter=str(folder))).base == base
    file.write_text("{")
    refused("model/reference:_adapter_config", id=str(folder))
    file.write_text(json.dumps(whole))  # copied again
    assert find_starting_weights(Model(id=str(folder))).base == base
    refused("model/reference:_local", id="./nowhere")


def test_settings_that_scoring_cannot_change_are_left_out(finished: RunDirectory, given: Given) -> None:
    spec = load_run_spec(finished.run_toml, own=True)
    with pytest.raises(TunedeckError):
        with_overrides(spec, ["train.epochs=1", "generate.max_new_tokens=3"])
    assert was_given(text_of("evaluate/run:with_overrides: leave it out"), given)
    assert with_overrides(spec, ["generate.max_new_tokens=3"]).recipe.generate.max_new_tokens == 3
    apart, held = (f'{key}=[{{name = "{key[:4]}", path = "builtin:dates"}}]' for key in SCORED_ON)
    with pytest.raises(TunedeckError, match=r"scored on its evaluate\.sources"):
        with_overrides(spec, [apart, held])
    assert was_given(text_of("evaluate/run:with_overrides: add --set evaluate"), given)
    assert with_overrides(spec, [apart, held, "evaluate.sources="]).recipe.data.validation[0].name == "data"


SCORED_ON = ("evaluate.sources", "data.validation")


def test_a_merge_goes_where_there_is_nothing(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given
) -> None:
    (tmp_path / "there").mkdir()
    assert tunedeck("merge", finished.name, "--out", "there").code == 2
    assert was_given(text_of("extras/handover/merge:merge: choose another folder"), given)
    assert tunedeck("merge", finished.name, "--out", "other", "--onto", "dequantized").code == 2
    assert was_given(text_of("extras/handover/merge:merge: leave out --onto"), given), given
    assert tunedeck("merge", finished.name, "--out", "other").code == 0


def test_an_archive_is_written_again_and_unpacked_where_there_is_room(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given
) -> None:
    archive = tmp_path / "run.zip"
    archive.write_bytes(b"cut")
    assert tunedeck("import", archive, "--runs", "taken").code == 2
    assert was_given(text_of("journal/archive:_refusal"), given), given
    archive.unlink()
    export_run(finished, archive, weights=False)
    (tmp_path / "file").write_text("")
    assert tunedeck("import", archive, "--runs", "file/runs").code == 6
    assert was_given(text_of("journal/archive:import_run"), given), given
    assert tunedeck("import", archive, "--runs", "taken").code == 0
    assert finished.name in tunedeck("runs", "--runs", "taken").out


def test_a_run_without_the_checkpoints_that_it_wrote_is_repeated(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given
) -> None:
    export_run(finished, tmp_path / "run.tunedeck", weights=True)
    assert tunedeck("import", "run.tunedeck", "--runs", "taken").code == 0
    events = (tmp_path / "taken" / finished.name / "events.jsonl").read_bytes()
    resumed = tunedeck("resume", "last", "--runs", "taken", "--set", "train.max_steps=100")
    assert resumed.code == 2 and (tmp_path / "taken" / finished.name / "events.jsonl").read_bytes() == events
    assert was_given(text_of("launch/resume_run:_refuse_lost_checkpoints"), given), resumed.err
    repeated = tunedeck(*suggested("", resumed.err))
    assert repeated.code == 0, repeated.err
    assert "done" in tunedeck("show", "last").out


def test_runs_without_scores_are_scored_by_the_command_that_is_named(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given
) -> None:
    other = finished.path.with_name(f"{finished.name}-2")
    (finished.path / "evaluations.jsonl").unlink(missing_ok=True)
    shutil.copytree(finished.path, other)
    assert tunedeck("eval", finished.name).code == 5
    assert was_given(text_of("evaluate/run:_data_to_score_on"), given), given
    compared = ("compare", finished.name, other.name, "--metric", "loss")
    refused = tunedeck(*compared)
    assert was_given(text_of("journal/score_groups:_nothing_to_compare: tunedeck eval {(runs"), given), refused.err
    command = shlex.split(refused.err.partition("fix: tunedeck ")[2])
    samples = load_run_spec(finished.run_toml, own=True).recipe.data.sources[0].path
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(str(samples)).read_text().splitlines(keepends=True)[:20]))
    answer = tunedeck(*(word.replace("FILE", str(samples)) for word in command), "--limit", "4")
    assert answer.code == 0, answer.err
    assert tunedeck(*compared).code == 0
    gains = (*compared, "--against", finished.name)
    for run, data in ((other, few), (finished.path, samples)):
        (run / "evaluations.jsonl").unlink()
        option = f'data.validation=[{{name="x", path="{data}"}}]'
        assert tunedeck("eval", run.name, "--set", option).code == 0
    refused = tunedeck(*gains)
    assert was_given(text_of("journal/score_groups:_nothing_to_compare: tunedeck eval {runs}"), given), refused.err
    command = shlex.split(refused.err.partition("fix: tunedeck ")[2])
    assert tunedeck(*(word.replace("FILE", str(samples)) for word in command)).code == 0
    assert tunedeck(*gains).code == 0


def test_a_webhook_is_told_once_its_variable_is_set(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(TunedeckError) as caught:
        webhook_url(Finish(webhook="$HOOK"))
    assert was_given(text_of("launch/destinations:webhook_url"), given)
    name, _, start = caught.value.fix.removeprefix("export ").partition("=")
    monkeypatch.setenv(name, start.replace("…", "127.0.0.1/told"))
    assert webhook_url(Finish(webhook="$HOOK")) == "https://127.0.0.1/told"


def test_a_merge_goes_to_a_disk_with_room(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage
    (tmp_path / "full").mkdir()

    def disk(folder: Path) -> Any:
        return usage(folder)._replace(free=0 if Path(folder).resolve() == tmp_path / "full" else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    assert tunedeck("merge", finished.name, "--out", "full/merged").code == 6
    assert was_given(text_of("extras/handover/merge:_require_space: free space"), given), given
    assert tunedeck("merge", finished.name, "--out", "merged").code == 0


def test_pairs_are_scored_as_their_chosen_answers(
    tunedeck: Tunedeck, finished: RunDirectory, tmp_path: Path, given: Given
) -> None:
    """Regression: the fix named `data.sources` and method.objective, which the scoring of a run does not take."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1 plus 1", "chosen": "2", "rejected": "3"}\n' * 4)
    source = 'name="pairs", path="pairs.jsonl"'
    refused = tunedeck("eval", finished.name, "--set", f"evaluate.sources=[{{{source}}}]")
    assert was_given(text_of("data/preferences:other_objective: to score it"), given), given
    command = shlex.split(refused.err.partition("answers, add ")[2])
    assert tunedeck("eval", finished.name, "--set", f"evaluate.sources=[{{{source}}}]", *command).code == 0


def test_full_models_are_assembled_once_the_adapter_is_merged(tmp_path: Path, given: Given) -> None:
    one, two = (dense(tmp_path / name, "llama", seed) for seed, name in enumerate(("a", "b")))
    (two / "adapter_config.json").write_text("{}")
    with pytest.raises(TunedeckError):
        assembled(tmp_path / "mixture", [one, two])
    assert was_given(text_of("extras/stages/assemble:_checked_config: set finish.merge"), given)
    (two / "adapter_config.json").unlink()  # a merged model has none
    other = dense(tmp_path / "c", "llama", 2, hidden_size=64)
    with pytest.raises(TunedeckError):
        assembled(tmp_path / "mixture", [one, other])
    assert was_given(text_of("extras/stages/assemble:_checked_config: change `from`"), given)
    assert assembled(tmp_path / "mixture", [one, two]).is_dir()


def test_hidden_states_are_collected_of_shorter_samples(
    tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = tmp_path / "rows.jsonl"
    samples.write_text(json.dumps({"text": "a text of many letters"}) + "\n")
    specs = {length: make_spec(samples, data={"max_length": length, "over_length": "truncate"}) for length in (64, 8)}
    tokenizer, device = load_tokenizer(specs[8].recipe.model), open_device(specs[8])
    with device.activate():
        loaded = load_model(specs[8], device, tokenizer)
        (layer, *_) = loaded.base.get_decoder().layers
        forward = layer.forward

        def limited(hidden_BSH: Any, *rest: Any, **options: Any) -> Any:
            if hidden_BSH.shape[1] > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return forward(hidden_BSH, *rest, **options)

        monkeypatch.setattr(layer, "forward", limited)
        with pytest.raises(TunedeckError):
            _layer_means(loaded, prepare_data(specs[64], tokenizer).train)
        assert was_given(text_of("extras/stages/assemble:_layer_means"), given)
        assert _layer_means(loaded, prepare_data(specs[8], tokenizer).train).isfinite().all()
