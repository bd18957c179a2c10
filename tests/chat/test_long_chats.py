"""Dozens of turns on a device with little more memory than the plan needs: each is answered, and nothing crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.budget.predict.inference import generation_bytes
from engine.config.schema.recipe import Generate
from engine.data.prompts import PromptTokens
from engine.device.open import open_device
from engine.extras.chat.answer import Conversation, Speaker
from engine.extras.chat.sources import ChatSource, facts_for_memory, load_sources
from tests.budget.metered_step import QWEN2, folder_of, run_spec
from tests.present import metered, present

TURNS = 60


@pytest.mark.parametrize("fails_every", [0, 17], ids=["as planned", "allocations fail"])
def test_every_turn_is_answered(fails_every: int, tmp_path: Path) -> None:
    folder, model = folder_of(QWEN2, tmp_path), {"dtype": "float32", "tokenizer": "builtin:bytes"}
    settings = Generate(max_new_tokens=6)
    roomy = run_spec(folder, model=model)
    with (device := open_device(roomy)).activate():
        load_sources([ChatSource("it", roomy, None)], device, lambda text: None)
        held_bytes = device.memory().allocated_bytes
    arch, config = present(facts_for_memory(roomy))
    needed = held_bytes + generation_bytes(arch, config, rows=1, prompt=160, generate=settings)
    spec = run_spec(folder, {"kind": "metered", "memory_gib": 1.05 * needed / 2**30}, model=model)
    device, said = open_device(spec), list[str]()
    with device.activate():
        (found,) = load_sources([ChatSource("it", spec, None)], device, lambda text: None)
        tokens = PromptTokens("it", found.loaded.tokenizer, spec, plain=False, think=None)
        speaker, conversation = Speaker(found, tokens, settings, said.append), Conversation("Be short.")
        for turn in range(TURNS):
            conversation.ask(f"question {turn}, and {turn * 7}?")
            if fails_every and turn % fails_every == fails_every - 1:
                metered(device).fail_at(30)
            answer = speaker.answer(conversation, turn)
            conversation.turns.append({"role": "assistant", "content": answer.text})
            assert answer.token_ids
            assert device.memory().peak_bytes <= device.capacity_bytes
    assert any("are left out of the prompt" in text for text in said)
    assert any("out of memory" in text for text in said) == bool(fails_every)
