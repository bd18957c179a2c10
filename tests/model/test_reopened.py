"""A result is opened with transformers and peft alone, in a process without our code, before it is reported as done."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem
from engine.journal.summary import summarise
from engine.journal.summary_text import weight_rows
from engine.model import plain_loader, reopened
from engine.model.loaded import LoadedModel
from engine.model.reopened import NotTriedError, PlainRequest, compare, open_plainly, own_logits, token_rows
from engine.model.tokenizer import byte_tokenizer
from engine.train.run.plain_result import open_result, rows_of_run
from tests import fork_server
from tests.events import read_events
from tests.model.samples import disturb, load, run_spec, write_model
from tests.train.run_helpers import make_spec, new_run, train

ROWS = token_rows(byte_tokenizer(), 2)


def request(model: Path, **keys: Any) -> PlainRequest:
    found = {"name": "the result", "auto_class": "AutoModelForCausalLM", "token_rows": ROWS, "attention": "eager"}
    return PlainRequest(model=str(model), config=str(model), **{**found, **keys})


def test_the_process_has_none_of_our_code(tmp_path: Path) -> None:
    """In a new interpreter, as users have it."""
    base = write_model(tmp_path / "base", "llama")
    script = Path(plain_loader.__file__)
    assert "engine" not in script.read_text().replace("`engine.model.reopened`", "")
    with fork_server.fresh_interpreters():
        answer = open_plainly(request(base))
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    for ours, theirs in zip(reopened.logits_of_rows(model.eval(), ROWS), answer.logits, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
    assert "engine" in sys.modules


def trained(tmp_path: Path, **method: Any) -> tuple[RunSpec, LoadedModel]:
    spec = run_spec(str(write_model(tmp_path / "base", "llama")), method=method, dtype="float32")
    loaded = load(spec)
    disturb(loaded)
    loaded.save(tmp_path / "result")
    return spec, loaded


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_sound_result_has_equal_logits_and_an_account(tmp_path: Path, kind: str) -> None:
    spec, loaded = trained(tmp_path, kind=kind)
    ours = own_logits(loaded, rows_of_run(spec, loaded))
    account = open_result(spec, loaded, tmp_path / "result", "result", ours, {})
    assert account.source == "result" and account.tensors == account.loaded > 0
    assert account.opened.startswith("with peft" if kind == "lora" else "with transformers alone")


@pytest.mark.parametrize("fault", ["scale", "transposed", "missing", "other values"])
def test_an_adapter_that_others_would_open_as_another_model_is_an_error(tmp_path: Path, fault: str) -> None:
    spec, loaded = trained(tmp_path, kind="lora", rank=4)
    ours = own_logits(loaded, rows_of_run(spec, loaded))
    folder = tmp_path / "result"
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    state = load_file(weights)
    first = min(state)
    if fault == "scale":
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 64}))
    elif fault == "transposed":
        state[first] = state[first].T.contiguous()
    elif fault == "missing":
        del state[first]
    else:
        state = {name: tensor * 3 for name, tensor in state.items()}
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"without Tunedeck|does not open with transformers and peft alone"):
        open_result(spec, loaded, folder, "result", ours, {})


def test_a_full_model_without_a_weight_is_an_error(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "qwen2", tie_word_embeddings=False)
    state = load_file(base / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"1 weights are in no file, such as lm_head.weight"):
        open_plainly(request(base))


def test_a_model_larger_than_memory_is_left_out_and_said(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    with pytest.raises(NotTriedError, match="a second copy of the model takes"):
        open_plainly(request(base, size_bytes=2**60))


def test_a_mixture_is_judged_by_its_median_position() -> None:
    ours = [torch.ones(5, 7), torch.ones(5, 7)]
    theirs = [ours[0].clone(), ours[1].clone()]
    theirs[0][0, 0] = -1.0
    assert "differ by at most 2 (largest logit 1)" in compare(ours, theirs, torch.float32, has_routers=True)
    with pytest.raises(EnvironmentProblem):
        compare(ours, theirs, torch.float32, has_routers=False)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_opens_its_result_and_tells_it(tmp_path: Path, kind: str) -> None:
    samples = tmp_path / "a.jsonl"
    samples.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    spec = make_spec(samples, method={"kind": kind}, train={"max_steps": 2, "batch_size": 2})
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    [account] = [each for each in read_events(place.events) if each["kind"] == "weights" and each["source"] == "result"]
    assert "logits of 2 rows differ by at most" in account["opened"] and account["unread"] == {}
    rows = dict(weight_rows(summarise(place).weights))
    assert "alone: logits of 2 rows" in rows["  opens"]


def test_a_base_that_is_gone_is_said_and_no_error_of_the_result(tmp_path: Path) -> None:
    spec, loaded = trained(tmp_path, kind="lora")
    ours = own_logits(loaded, rows_of_run(spec, loaded))
    shutil.rmtree(tmp_path / "base")
    account = open_result(spec, loaded, tmp_path / "result", "result", ours, {})
    assert account.opened.startswith("not opened: there is no folder")


def test_a_run_whose_result_does_not_open_fails_and_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of a library that saves what no one opens: here one that forgets the adapter's scale."""
    samples = tmp_path / "a.jsonl"
    samples.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    method = {"kind": "lora", "rank": 4, "alpha": 64}
    spec = make_spec(samples, method=method, train={"max_steps": 2, "batch_size": 2, "learning_rate": 0.1})
    place = new_run(tmp_path / "runs", spec)
    write = LoadedModel.save

    def save(loaded: LoadedModel, folder: Path) -> Any:
        hashes = write(loaded, folder)
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 1}))
        return hashes

    monkeypatch.setattr(LoadedModel, "save", save)
    code, events = train(place)
    assert code == EnvironmentProblem.exit_code
    assert "is not the model that was trained" in events[-1]["error"]
    assert not place.adapter.exists() and (place.checkpoint(2) / "weights" / "adapter_config.json").is_file()
