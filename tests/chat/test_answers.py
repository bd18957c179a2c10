"""Answers: equal to transformers' own, whole when streamed, ended by the right tokens, short enough for the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.schema.recipe import Generate
from engine.data.prompts import PromptTokens
from engine.device.base import GpuProcess, GpuReading
from engine.device.metered import MeteredDevice
from engine.device.open import open_device
from engine.errors import DataError, DeviceBusyError, DoesNotFitError
from engine.evaluate.generation import end_tokens
from engine.extras.chat.answer import Conversation, Speaker, TextStream, decode
from engine.extras.chat.server import ChatProcess
from engine.extras.chat.sources import ChatModel, ChatSource, load_sources
from engine.journal.chats import ChatInbox, ChatState, create_chat
from engine.journal.directory import create_run_directory
from engine.journal.events import EventWriter, Journal
from engine.journal.liveness import identify, record_engine
from engine.model.tokenizer import byte_tokenizer
from tests.budget.metered_step import GEMMA3, GPT2, LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, folder_of, run_spec
from tests.present import metered, present

FAMILIES = [LLAMA, QWEN2, QWEN3, GEMMA3, PHI3, GPT2, MIXTRAL]
QUESTION = "When is Ann's birthday, and whose is next? 👩‍👩‍👧 é"


def silent(text: str) -> None:
    """Drop a notice."""


def speaker_of(model: ChatModel, **settings: Any) -> Speaker:
    tokens = PromptTokens("it", model.loaded.tokenizer, model.spec, plain=False, think=None)
    return Speaker(model, tokens, Generate(**{"max_new_tokens": 24, **settings}), silent)


def asking(question: str = QUESTION, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    conversation.ask(question)
    return conversation


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_a_greedy_answer_is_the_one_that_transformers_generates(config: dict[str, Any], tmp_path: Path) -> None:
    model = {"dtype": "float32", "tokenizer": "builtin:bytes"}
    spec = run_spec(folder_of(config, tmp_path), model=model, method={"kind": "full"}, data={"max_length": 64})
    device = open_device(spec)
    with device.activate():
        (found,) = load_sources([ChatSource("it", spec, None)], device, silent)
        answer = speaker_of(found).answer(asking(), 0)
        ids = torch.tensor([PromptTokens("it", found.loaded.tokenizer, spec, plain=False, think=None).ids(
            asking().messages())])  # fmt: skip
        with torch.no_grad():
            whole = found.loaded.model.eval().generate(
                input_ids=device.upload(ids), attention_mask=device.upload(torch.ones_like(ids)), max_new_tokens=24,
                do_sample=False, eos_token_id=end_tokens(found.loaded) or None,
                pad_token_id=found.loaded.tokenizer.pad_token_id,
            )  # fmt: skip
        assert answer.token_ids == whole[0, ids.shape[1] :].tolist()
        assert answer.stopped_by == ("end" if answer.token_ids[-1] in end_tokens(found.loaded) else "length")


def test_streamed_text_is_the_whole_text() -> None:
    tokenizer = byte_tokenizer()
    ids = [int(number) for number in tokenizer("a👩‍👩‍👧é\ne\u0301 中", add_special_tokens=False)["input_ids"]]
    shown: list[str] = []
    stream = TextStream(tokenizer, shown.append)
    stream.put(torch.tensor([[1, 2]]))
    for number in ids:
        stream.put(torch.tensor([number]))
        assert "\ufffd" not in "".join(shown)
    stream.end()
    assert "".join(shown) == decode(tokenizer, ids) == "a👩‍👩‍👧é\ne\u0301 中"
    assert len(shown) > 5


def test_the_oldest_turns_are_left_out_and_never_the_system_prompt(tmp_path: Path) -> None:
    spec = run_spec(folder_of(QWEN2, tmp_path), model={"tokenizer": "builtin:bytes"})
    tokens = PromptTokens("it", byte_tokenizer(), spec, plain=False, think=None)
    conversation = Conversation("Be short.")
    for number in range(6):
        conversation.ask(f"question {number}")
        conversation.turns.append({"role": "assistant", "content": f"answer {number}"})
    conversation.ask("the last")
    whole = tokens.ids(conversation.messages())
    assert conversation.fitted(tokens, len(whole)).left_out == 0
    fitted = conversation.fitted(tokens, len(whole) - 1)
    assert fitted.left_out == 2 and len(fitted.ids) < len(whole)
    least = decode(byte_tokenizer(), conversation.fitted(tokens, 1).ids)
    assert "Be short." in least and "the last" in least and "question 5" not in least


def test_a_question_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    config = {**GPT2, "n_positions": 64}
    spec = run_spec(folder_of(config, tmp_path), model={"tokenizer": "builtin:bytes"}, method={"kind": "full"})
    device = open_device(spec)
    with device.activate():
        (found,) = load_sources([ChatSource("it", spec, None)], device, silent)
        with pytest.raises(DataError, match="64 positions"):
            speaker_of(found).answer(asking("x" * 100), 0)
        assert len(speaker_of(found).answer(asking("x" * 20), 0).token_ids) <= 44


def test_a_chat_that_does_not_fit_ends_before_anything_is_loaded(tmp_path: Path) -> None:
    spec = run_spec(
        folder_of(LLAMA, tmp_path), {"kind": "metered", "memory_gib": 0.0005}, model={"tokenizer": "builtin:bytes"}
    )
    device = open_device(spec)
    with device.activate():
        with pytest.raises(DoesNotFitError, match="the chat needs"):
            load_sources([ChatSource("it", spec, None)], device, silent)
        assert device.memory().allocated_bytes == 0


class HeldDevice(MeteredDevice):
    """A device on which another process holds memory, as NVML would say of a GPU."""

    held_bytes = 3 << 30

    def readings(self) -> list[GpuReading]:
        other = GpuProcess(os.getppid(), self.held_bytes, "python")
        return [GpuReading(0, "a GPU", "GPU-0", 4 << 30, self.held_bytes, None, None, None, (other,))]


def test_a_busy_device_says_who_holds_it(tmp_path: Path) -> None:
    spec = run_spec(folder_of(LLAMA, tmp_path), model={"tokenizer": "builtin:bytes"})
    device = HeldDevice(1 << 20)
    with device.activate(), pytest.raises(DeviceBusyError, match=f"pid {os.getppid()}") as refused:
        load_sources([ChatSource("it", spec, None)], device, silent)
    assert refused.value.exit_code == 6


def test_a_forgotten_chat_ends_by_itself(tmp_path: Path) -> None:
    directory = create_chat(tmp_path, {})
    with EventWriter(directory) as writer:
        chat: Any = None  # it is asked nothing
        process = ChatProcess(chat, Journal(writer), ChatInbox(directory), ChatState(), idle_seconds=0.0)
        process.run()
    assert process.ending == "no question for 0 minutes"


def test_what_a_training_is_predicted_to_need_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_RUNS", str(tmp_path / "runs"))
    run = create_run_directory(tmp_path / "runs", "trains", 'name = "trains"\n', {"peak_bytes": 64 << 30})
    record_engine(run, present(identify(os.getppid())))
    spec = run_spec(folder_of(QWEN2, tmp_path / "model"), model={"tokenizer": "builtin:bytes"})
    with (device := HeldDevice(8 << 30)).activate():
        with pytest.raises(DeviceBusyError, match="the chat needs"):
            load_sources([ChatSource("it", spec, None)], device, silent)
        (run.plan_json).write_text('{"peak_bytes": 1}')
        assert load_sources([ChatSource("it", spec, None)], device, silent)


def test_memory_that_runs_out_shortens_the_history_and_answers(tmp_path: Path) -> None:
    spec = run_spec(folder_of(QWEN2, tmp_path), model={"dtype": "float32", "tokenizer": "builtin:bytes"})
    device = open_device(spec)
    said: list[str] = []
    with device.activate():
        (found,) = load_sources([ChatSource("it", spec, None)], device, silent)
        speaker = speaker_of(found)
        speaker.notify = said.append
        conversation = Conversation()
        for number in range(8):
            conversation.ask(f"question {number}")
            conversation.turns.append({"role": "assistant", "content": f"answer {number}"})
        conversation.ask("the last")
        metered(device).fail_at(40)
        answer = speaker.answer(conversation, 0)
    assert answer.token_ids and any("out of memory" in text for text in said)
