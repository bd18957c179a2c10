"""Greedy answers are transformers' own, token for token: through stock templates, batched and alone, with an adapter on
and off, and with images."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.config.schema.recipe import Generate
from engine.data.chat_template import Message
from engine.data.prompts import PromptTokens
from engine.device.open import open_device
from engine.evaluate.generation import end_tokens, generate
from engine.extras.chat.answer import Answer, Conversation, Listener, Speaker
from engine.extras.chat.sources import ChatModel, ChatSource, load_sources
from engine.model.loaded import LoadedModel
from engine.model.saved_adapter import ADAPTER
from engine.model.tokenizer import load_chat_processor
from tests.budget.metered_step import GEMMA3, GPT2, LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, folder_of, run_spec
from tests.vision_models import IMAGE_TOKENS, write_qwen2_vl
from tests.vocabularies import missing, vocabulary

TRL = find_spec("trl")
TEMPLATES = Path(TRL.origin if TRL and TRL.origin else "no trl").parent / "chat_templates"


class Family(NamedTuple):
    config: dict[str, Any]
    template: str
    """Name of its stock template in the package trl, or its text; empty: it has none."""
    vocabulary: str
    """Name of its real vocabulary in tests/vocabularies.py."""
    end: str
    """Token that ends an answer in its published generation config."""


MIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
FAMILIES = {
    "llama": Family(LLAMA, "llama3", "llama-bpe", "<|eot_id|>"),
    "qwen2": Family(QWEN2, "qwen2_5", "qwen2", "<|im_end|>"),
    "qwen3": Family(QWEN3, "qwen3", "qwen3", "<|im_end|>"),
    "gemma3": Family(GEMMA3, "gemma3", "gemma3", "<end_of_turn>"),
    "phi3": Family(PHI3, "phi3", "phi-3", "<|end|>"),
    "gpt2": Family(GPT2, "", "gpt-2", "<|endoftext|>"),
    "mixtral": Family(MIXTRAL, MIXTRAL_TEMPLATE, "mixtral", "</s>"),
}
QUESTIONS = ["When is Ann's birthday?", "And whose is next? 👩‍👩‍👧 é", "x"]
NEW_TOKENS = 12


def speaker_of(model: ChatModel) -> Speaker:
    tokenizer, spec = model.loaded.tokenizer, model.spec
    plain, images = tokenizer.chat_template is None, load_chat_processor(spec, tokenizer)
    tokens = PromptTokens("it", tokenizer, spec, plain=plain, think=None, images=images)
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


def template_of(name: str) -> str:
    return name if "{" in name or not name else (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl, which has the stock templates, is not installed")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_answers_are_transformers_own(family: Family, tmp_path: Path) -> None:
    model = {"tokenizer": "builtin:bytes"}
    if family.template:
        (tmp_path / "template.jinja").write_text(template_of(family.template), "utf-8")
        model["chat_template"] = str(tmp_path / "template.jinja")
    answers_as_transformers(folder_of(family.config, tmp_path), model)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl, which has the stock templates, is not installed")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_answers_are_transformers_own_on_real_vocabularies(family: Family, tmp_path: Path) -> None:
    if reason := missing(family.vocabulary):
        pytest.skip(reason)
    tokenizer = saved_vocabulary(family, tmp_path / "tokenizer")
    config = {**family.config, "vocab_size": len(tokenizer)}
    loaded = answers_as_transformers(folder_of(config, tmp_path), {"tokenizer": str(tmp_path / "tokenizer")})
    assert tokenizer.convert_tokens_to_ids(family.end) in end_tokens(loaded)


def saved_vocabulary(family: Family, folder: Path) -> PreTrainedTokenizerBase:
    """The family's tokenizer as a model is published with it, with its stock template."""
    tokenizer = deepcopy(vocabulary(family.vocabulary))
    tokenizer.chat_template = template_of(family.template) or None
    tokenizer.save_pretrained(folder)
    return tokenizer


def answers_as_transformers(folder: Path, model: dict[str, Any]) -> LoadedModel:
    """Compare base and adapter with transformers' generate, batched and alone; returns the model."""
    method = {"kind": "lora", "rank": 4, "targets": "attention"}
    spec = run_spec(folder, model={"dtype": "float32", **model}, method=method)
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
                answer, streamed = streamed_answer(speaker, {"role": "user", "content": text})
                assert answer.token_ids == own, "alone"
                assert streamed == answer.text
        assert theirs != [own_answer_without(tuned, ids) for ids in prompts], "the adapter changes answers"
    return loaded


def streamed_answer(speaker: Speaker, message: Message) -> tuple[Answer, str]:
    """The answer, and the text that was shown while it was written."""
    shown: list[str] = []
    return speaker.answer(Conversation(None, [message]), 0, Listener(text=shown.append)), "".join(shown)


def own_answer_without(model: ChatModel, ids: list[int]) -> list[int]:
    assert isinstance(model.loaded.model, PeftModel)
    with model.loaded.model.disable_adapter():
        return own_answer(model.loaded, ids)


IMAGE_SIZES: Sequence[list[tuple[int, int]]] = [(80, 60)], [(112, 84), (56, 140)], []
"""Width and height of the pictures of three questions; the last has none."""


@pytest.mark.parametrize("real", [False, True], ids=["bytes", "real vocabulary"])
def test_answers_about_pictures_are_transformers_own(real: bool, tmp_path: Path) -> None:
    tokenizer = None
    if real:
        if reason := missing("qwen2") or ("" if TEMPLATES.is_dir() else "trl is not installed"):
            pytest.skip(reason)
        tokenizer = deepcopy(vocabulary("qwen2"))
        tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS]})
        tokenizer.chat_template = template_of("qwen2_5_vl")
    spec = run_spec(write_qwen2_vl(tmp_path / "model", tokenizer=tokenizer),
                    model={"dtype": "float32", "tokenizer": None, "init": "pretrained"},
                    method={"kind": "lora", "rank": 4, "targets": "attention"})  # fmt: skip
    messages = [asked_with(sizes, tmp_path / f"{number}") for number, sizes in enumerate(IMAGE_SIZES)]
    device = open_device(spec)
    with device.activate():
        (base,) = load_sources([ChatSource("it", spec, None)], device, lambda text: None)
        with_random_adapter(base.loaded)
        answers = [answers_about(one, messages) for one in (base, ChatModel("it", spec, base.loaded, ADAPTER))]
    assert answers[0] != answers[1], "the adapter changes answers"


def asked_with(sizes: Sequence[tuple[int, int]], folder: Path) -> Message:
    """A question about pictures of these sizes, which are written to `folder`."""
    folder.mkdir()
    parts = []
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (10, 90 * number, 200)).save(folder / f"{number}.png")
        parts.append({"type": "image", "image": str(folder / f"{number}.png")})
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is here? é 👩‍👩‍👧"}]}


def answers_about(one: ChatModel, messages: list[Message]) -> list[list[int]]:
    """The answers to each question, which transformers' generate, a batch and a chat give alike."""
    speaker, loaded = speaker_of(one), one.loaded
    prompts = [speaker.tokens.ids([message]) for message in messages]

    def images_of(asked: list[Message], ids_BS: Tensor) -> dict[str, Tensor]:
        return {name: loaded.device.upload(it) for name, it in speaker.tokens.image_inputs(asked, ids_BS).items()}

    with one.active():
        theirs = [own_answer(loaded, ids, **images_of([message], torch.tensor([ids])))
                  for message, ids in zip(messages, prompts, strict=True)]  # fmt: skip
        batched = generate(loaded, prompts, [0, 1, 2], speaker.settings, partial(images_of, messages))
    assert [until_end(answer, end_tokens(loaded)) for answer in batched] == theirs, "batched"
    alone = [streamed_answer(speaker, message) for message in messages]
    assert [answer.token_ids for answer, _ in alone] == theirs, "alone"
    assert all(streamed == answer.text for answer, streamed in alone)
    return theirs
