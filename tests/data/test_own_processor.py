"""Images of families whose own processor is asked: their tokens, their arrays, what is never learned, and refusals."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from engine.config.schema.run import RunSpec
from engine.data.batch import collate
from engine.data.images import ImageFacts
from engine.data.own_processor import TEXT_INPUTS, OwnProcessor, _without_video
from engine.data.prepare import prepare_data
from engine.data.tokens import IGNORED
from engine.errors import TunedeckError
from engine.model.tokenizer import byte_tokenizer, load_image_processor, load_tokenizer
from tests.budget.metered_step import run_spec
from tests.own_processors import FAMILIES, write_own

SIZES = ((112, 84), (56, 112))
NESTED = ("idefics3", "smolvlm")
"""Their processors return a place for every image of the longest row."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    yield


def spec_for(model: Path, folder: Path, **data: Any) -> RunSpec:
    """Two conversations of one image each, of different sizes."""
    rows = []
    for number, size in enumerate(SIZES):
        Image.effect_noise(size, 90.0).convert("RGB").save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": "What?", "completion": "A plane."})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "chat", "path": str(folder / "chat.jsonl"), "format": "image-chat"}
    asked = {"tokenizer": str(model), "init": "pretrained"}
    return run_spec(str(model), model=asked, data={"sources": [source], "max_length": 256, **data})


def own(spec: RunSpec) -> OwnProcessor:
    found = load_image_processor(spec, load_tokenizer(spec.recipe.model))
    assert isinstance(found, OwnProcessor)
    return found


def transformers_own(processor: OwnProcessor, family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor. SmolVLM's, which ours stands for, needs a package that only names numbers of frames."""
    if family != "smolvlm":
        return processor.processor
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    ours = processor.processor
    stated = {"image_seq_len": ours.image_seq_len}
    return _without_video(processing_smolvlm.SmolVLMProcessor, stated, ours.image_processor, ours.tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_is_what_the_processor_makes_of_the_same_texts_and_images(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_own(tmp_path / "model", family)
    spec = spec_for(model, tmp_path)
    tokenizer, processor = load_tokenizer(spec.recipe.model), own(spec)
    data = prepare_data(spec, tokenizer, processor).train
    assert len(data) == 2
    turns: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
             {"role": "assistant", "content": "A plane."}]  # fmt: skip
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    images = [Image.open(tmp_path / f"{number}.png").convert("RGB") for number in range(2)]
    whole = transformers_own(processor, family, monkeypatch)(
        text=[text, text], images=[[image] for image in images] if family in (*NESTED, "gemma4") else images,
        padding=True, return_tensors="pt", add_special_tokens=False,
    )  # fmt: skip
    batch = collate(data, [0, 1], pad_id=int(tokenizer.pad_token_id))
    assert torch.equal(batch.input_ids_BS, whole["input_ids"])
    arrays = {name: value for name, value in whole.items() if name not in TEXT_INPUTS}
    assert arrays.keys() == batch.images.keys() - {"mm_token_type_ids"}
    for name, value in arrays.items():
        theirs = torch.as_tensor(value)
        if family in NESTED:  # a place for every image of the longest row, empty places zero, which the model skips
            theirs = theirs.flatten(0, 1)
            theirs = theirs[theirs.flatten(1).any(1)]
        assert torch.equal(batch.images[name].flatten(), theirs.flatten())
    assert ("mm_token_type_ids" in batch.images) == ("mm_token_type_ids" in whole)
    if "mm_token_type_ids" in whole:
        assert torch.equal(batch.images["mm_token_type_ids"], torch.as_tensor(whole["mm_token_type_ids"]))


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "idefics3"])
def test_no_token_of_an_image_is_learned(family: str, tmp_path: Path) -> None:
    spec = spec_for(write_own(tmp_path / "model", family), tmp_path, loss_on="all")
    tokenizer, processor = load_tokenizer(spec.recipe.model), own(spec)
    for example, (width, height) in zip(prepare_data(spec, tokenizer, processor).train, SIZES, strict=True):
        ids = example.input_ids.tolist()
        parts = processor.processor(
            text=[processor.token], images=[Image.new("RGB", (width, height))], add_special_tokens=False,
        )["input_ids"][0]  # fmt: skip
        parts = list(map(int, parts))
        (start,) = (place for place in range(len(ids)) if ids[place : place + len(parts)] == parts)
        assert (example.labels[start : start + len(parts)] == IGNORED).all()
        assert (example.labels[start + len(parts) + 1 :] != IGNORED).any()


def test_mistrals_rows_of_patches_end_in_a_token_of_their_own(tmp_path: Path) -> None:
    spec = spec_for(write_own(tmp_path / "model", "mistral3"), tmp_path)
    processor = own(spec)
    row = "[IMG][IMG][IMG][IMG]"
    made = processor.expansion(facts_of(processor, 84, 112))
    assert processor.processor.tokenizer.decode(made) == f"{row}[IMG_BREAK]{row}[IMG_BREAK]{row}[IMG_END]"


def facts_of(processor: OwnProcessor, height: int, width: int) -> ImageFacts:
    return ImageFacts(*processor.patches_of(height, width), 0)


def test_a_processor_is_sent_to_the_processes_that_tokenise(tmp_path: Path) -> None:
    processor = own(spec_for(write_own(tmp_path / "model", "qwen3_vl"), tmp_path))
    again = pickle.loads(pickle.dumps(processor))
    facts = facts_of(processor, 84, 112)
    assert again.expansion(facts) == processor.expansion(facts)
    assert again.fingerprint_parts() == processor.fingerprint_parts()


def test_bounds_of_pixels_reach_the_processor_and_its_files(tmp_path: Path) -> None:
    model = write_own(tmp_path / "model", "qwen3_vl")
    wide, small = (own(spec_for(model, tmp_path, image_max_pixels=most)) for most in (112**2, 56**2))
    counts = [len(each.expansion(facts_of(each, 112, 112))) for each in (wide, small)]
    assert counts == [16, 4]
    small.save(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 56**2


@pytest.mark.parametrize(
    ("family", "data", "words"),
    [
        ("llava", {"image_max_pixels": 56**2}, "have no effect for a llava model"),
        ("mistral3", {"image_min_pixels": 56**2}, "have no effect for a mistral3 model"),
    ],
)
def test_bounds_of_pixels_are_refused_where_images_are_resized_to_sides(
    family: str, data: dict[str, Any], words: str, tmp_path: Path
) -> None:
    spec = spec_for(write_own(tmp_path / "model", family), tmp_path, **data)
    with pytest.raises(TunedeckError, match=words):
        own(spec)


def test_a_tokenizer_without_the_image_token_is_refused(tmp_path: Path) -> None:
    model = write_own(tmp_path / "model", "llava_next")
    byte_tokenizer().save_pretrained(tmp_path / "plain")
    spec = spec_for(model, tmp_path)
    other = spec.recipe.model.model_copy(update={"tokenizer": str(tmp_path / "plain")})
    with pytest.raises(TunedeckError, match=r"LlavaNextProcessor .*not a single token"):
        load_image_processor(spec, load_tokenizer(other))
