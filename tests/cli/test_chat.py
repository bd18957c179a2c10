"""`tunedeck chat`: answers of runs, checkpoints, bases and models, and what it refuses."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.config.load import load_run_spec, resolve
from engine.data.prompts import PromptTokens
from engine.device.open import open_device
from engine.extras.chat.answer import Conversation
from engine.extras.chat.sources import ChatSource, load_sources
from tests.cli.conftest import Tunedeck
from tests.train.run_helpers import new_run, train

SETS = (
    "method.kind=lora", "train.max_steps=4", "train.warmup_steps=0", "checkpoint.every_steps=2", "eval.limit=4",
    "generate.max_new_tokens=12",
)  # fmt: skip
KEYS = {"prompt", "text", "token_ids", "stopped_by", "seconds"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a LoRA run of the demo with checkpoints at steps 2 and 4."""
    spec = resolve("demo", "demo", [*SETS, "data.sources.dates.limit=400"]).spec
    place = new_run(tmp_path_factory.mktemp("finished"), spec.model_copy(update={"name": "one"}))
    assert train(place)[0] == 0
    return place.path


@pytest.fixture
def trained(tunedeck: Tunedeck, finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run among the runs of a test."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def test_a_run_its_checkpoint_and_its_base_answer_side_by_side(tunedeck: Tunedeck, trained: Path) -> None:
    asked = tunedeck("chat", "one", "one@2", "--base", "--prompt", "3 May ->", "--prompt", "x", "--json")
    assert asked.code == 0, asked.err
    answers = json.loads(asked.out)["answers"]
    assert {frozenset(answer) for answer in answers} == {frozenset(KEYS | {"model"})}
    assert [answer["prompt"] for answer in answers] == ["3 May ->"] * 3 + ["x"] * 3
    names = [answer["model"] for answer in answers[:3]]
    assert names == ["one's base", "one", "one@2"], "both were trained from one base"
    one = tunedeck("chat", "one", "--prompt", "3 May ->", "--json")
    (alone,) = json.loads(one.out)["answers"]
    assert set(alone) == KEYS and alone["token_ids"] == answers[1]["token_ids"]


def test_an_adapter_switched_off_is_its_base_to_the_bit(trained: Path) -> None:
    spec = load_run_spec(trained / "run.toml", own=True)
    device = open_device(spec)

    def logits_of(sources: list[ChatSource], which: int) -> torch.Tensor:
        model = load_sources(sources, device, lambda text: None)[which]
        tokens = PromptTokens("it", model.loaded.tokenizer, spec, plain=True, think=None)
        conversation = Conversation()
        conversation.ask("3 May ->")
        ids = device.upload(torch.tensor([tokens.ids(conversation.messages())]))
        with model.active(), torch.no_grad():
            found: torch.Tensor = model.loaded.model(input_ids=ids).logits.float().cpu()
        return found

    base, run = ChatSource("base", spec, None), ChatSource("run", spec, trained / "adapter")
    early = ChatSource("early", spec, next(trained.glob("checkpoints/*2/*adapter*"), trained / "adapter"))
    with device.activate():
        shared = logits_of([run, early, base], 2)
        assert torch.equal(shared, logits_of([base], 0))
        assert not torch.equal(shared, logits_of([run], 0))
        assert torch.equal(logits_of([early, run], 1), logits_of([run], 0)), "beside another adapter"


def test_a_run_without_a_result_answers_with_its_newest_checkpoint(tunedeck: Tunedeck, trained: Path) -> None:
    shutil.rmtree(trained / "adapter")
    asked = tunedeck("chat", "one", "--prompt", "hi")
    assert asked.code == 0 and "step 4" in asked.err
    shutil.rmtree(trained / "checkpoints")
    tunedeck("chat", "one", "--prompt", "hi").complains(2, "no result or checkpoint yet")


def test_what_cannot_be_asked_is_refused(tunedeck: Tunedeck, trained: Path, tmp_path: Path) -> None:
    tunedeck("chat", "one", "--json").complains(2, "--json", "--prompt")
    refused = tunedeck("chat", "one", "--prompt", "x", "--think", "on")
    assert refused.code == 2 and "has no switch for thinking" in refused.err
    tunedeck("chat", "one", "--prompt", "x", "--set", "train.epochs=1").complains(2, "train.epochs", "generate")
    tunedeck("chat", "one", "--file", "no.txt").complains(5, "no.txt")
    tunedeck("chat", "nothing-here", "--prompt", "x").complains(2, "nothing-here", "OWNER/NAME")
    refused = tunedeck("chat", "one", "--prompt", "x" * 30_000)
    assert refused.code == 5 and "positions" in refused.err


def test_a_file_of_prompts_and_a_model_that_is_no_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    asked = tunedeck("chat", "builtin:tiny", "-p", "demo", "--file", "asked.jsonl", "--json")
    assert asked.code == 0, asked.err
    assert [answer["prompt"] for answer in json.loads(asked.out)["answers"]] == ["one", "two"]


def test_a_conversation_is_undone_and_saved_as_a_data_source(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "/help\n/nonsense\nfirst\n/undo\nsecond\n/regen\n/system Be short.\nthird\n/save talk.jsonl\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    asked = tunedeck("chat", "builtin:tiny", "-p", "demo", "--set", "generate.max_new_tokens=6")
    assert asked.code == 0 and "unknown command /nonsense" in asked.err and asked.err.count("/undo   ") == 1, asked.err
    (row,) = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert row["messages"][0]["content"] == "Be short."
    assert "first" not in json.dumps(row)
    (tmp_path / "talk.toml").write_text(
        'schema = 1\nkind = "recipe"\n[model]\nid = "builtin:tiny"\n'
        '[[data.sources]]\nname = "talk"\npath = "talk.jsonl"\n[train]\nmax_steps = 1\n'
    )
    shown = tunedeck("data", "-r", "./talk.toml", "--show", "1")
    assert shown.code == 0 and "second" in shown.out, shown.err
