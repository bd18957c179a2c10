"""Greedy answers are transformers' own, token for token: through stock templates, batched and alone, with an adapter on
and off, and with images."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor

from engine.chat.answer import Speaker
from engine.chat.conversation import Conversation
from engine.chat.sources import ChatModel, ChatSource, load_sources
from engine.config.schema.recipe import Generate
from engine.config.schema.run import RunSpec
from engine.data.prompts import PromptTokens
from engine.device import open_device
from engine.evaluate.generation import end_tokens, generate
from engine.model.loaded import ADAPTER, LoadedModel
from engine.model.tokenizer import load_chat_processor
from tests.budget.metered_step import GEMMA3, GPT2, LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, folder_of, run_spec
from tests.vision_models import write_qwen2_vl

TRL = find_spec("trl")
TEMPLATES = Path(TRL.origin if TRL and TRL.origin else "no trl").parent / "chat_templates"
STOCK = [(LLAMA, "llama3"), (QWEN2, "qwen2_5"), (QWEN3, "qwen3"), (GEMMA3, "gemma3"), (PHI3, "phi3"), (GPT2, ""),
         (MIXTRAL, "")]  # fmt: skip
"""Families, and the names of their stock templates in the package trl."""
QUESTIONS = ["When is Ann's birthday?", "And whose is next? 👩‍👩‍👧 é", "x"]
NEW_TOKENS = 12


def speaker_of(model: ChatModel) -> Speaker:
    tokenizer, spec = model.loaded.tokenizer, model.spec
    tokens = PromptTokens("it", tokenizer, spec, plain=False, think=None, images=load_chat_processor(spec, tokenizer))
    return Speaker(model, tokens, Generate(max_new_tokens=NEW_TOKENS), lambda text: None)


def own_answer(loaded: LoadedModel, ids: list[int], **images: Tensor) -> list[int]:
    """What transformers' generate returns for one prompt, with the settings as they are."""
    given = torch.tensor([ids])
    with torch.no_grad():
        whole: Any = loaded.model.eval().generate(
            input_ids=loaded.device.upload(given), attention_mask=loaded.device.upload(torch.ones_like(given)),
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end_tokens(loaded) or None,
            pad_token_id=loaded.tokenizer.pad_token_id, **images,
        )  # fmt: skip
    answer: list[int] = whole[0, len(ids) :].tolist()
    return answer


def with_random_adapter(loaded: LoadedModel) -> None:
    torch.manual_seed(7)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)


def until_end(answer: list[int], ends: list[int]) -> list[int]:
    return next((answer[: at + 1] for at, token in enumerate(answer) if token in ends), answer)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl, which has the stock templates, is not installed")
@pytest.mark.parametrize(("config", "template"), STOCK, ids=[config["model_type"] for config, _ in STOCK])
def test_answers_are_transformers_own(config: dict[str, Any], template: str, tmp_path: Path) -> None:
    model = {"dtype": "float32", "tokenizer": "builtin:bytes"}
    if template:
        model["chat_template"] = str(TEMPLATES / f"{template}.jinja")
    method = {"kind": "lora", "rank": 4, "targets": "attention"}
    spec = run_spec(folder_of(config, tmp_path), model=model, method=method)
    device = open_device(spec)
    with device.activate():
        (base,) = load_sources([ChatSource("it", spec, None)], device, lambda text: None)
        loaded = base.loaded
        with_random_adapter(loaded)
        assert isinstance(loaded.model, PeftModel)
        tuned = ChatModel("it", spec, loaded, ADAPTER)
        for one in (base, tuned):
            speaker = speaker_of(one)
            prompts = [speaker.tokens.ids([{"role": "user", "content": text}]) for text in QUESTIONS]
            with one.active():
                theirs = [own_answer(loaded, ids) for ids in prompts]
                batched = generate(loaded, prompts, [0, 1, 2], speaker.settings)
            assert [until_end(answer, end_tokens(loaded)) for answer in batched] == theirs, "batched"
            for text, own in zip(QUESTIONS, theirs, strict=True):
                conversation = Conversation()
                conversation.ask(text)
                assert speaker.answer(conversation, 0).token_ids == own, "alone"
        assert theirs != [own_answer_without(tuned, ids) for ids in prompts], "the adapter changes answers"


def own_answer_without(model: ChatModel, ids: list[int]) -> list[int]:
    assert isinstance(model.loaded.model, PeftModel)
    with model.loaded.model.disable_adapter():
        return own_answer(model.loaded, ids)


def spec_with_images(folder: Path) -> RunSpec:
    return run_spec(folder, model={"dtype": "float32", "tokenizer": None, "init": "pretrained"},
                    method={"kind": "full"})  # fmt: skip


def test_answers_about_pictures_are_transformers_own(tmp_path: Path) -> None:
    spec = spec_with_images(write_qwen2_vl(tmp_path / "model"))
    paths = []
    for number, size in enumerate(((80, 60), (112, 84))):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", size, (10, 90 * number, 200)).save(paths[-1])
    device = open_device(spec)
    with device.activate():
        (found,) = load_sources([ChatSource("it", spec, None)], device, lambda text: None)
        speaker = speaker_of(found)
        parts: list[dict[str, str]] = [{"type": "image", "image": path} for path in paths]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is here?"}]}
        ids = speaker.tokens.ids([message])
        given = {name: device.upload(tensor) for name, tensor in
                 speaker.tokens.image_inputs([message], torch.tensor([ids])).items()}  # fmt: skip
        own = own_answer(found.loaded, ids, **given)
        answer = speaker.answer(Conversation(None, [message]), 0)
    assert answer.token_ids == own and answer.prompt == "What is here?"
