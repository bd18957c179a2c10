"""The byte tokenizer, and the rules for the tokenizers of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.config.schema.recipe import Model
from engine.errors import UsageError
from engine.model.tokenizer import byte_tokenizer, check_vocabulary, give_pad_token, load_tokenizer
from tests.model.samples import write_model

TEXTS = ["", "plain", "née ñ", "日本語 🎉", " a  b\n\n\tc ", "\x00\x7f\u2028", "e\u0301 not composed", "n't 's <b>"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_vocabulary_is_a_multiple_of_eight_and_matches_the_builtin_model() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 264
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


def test_the_chat_template_marks_assistant_tokens() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rendered: Any = byte_tokenizer().apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, on in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if on]
    assert byte_tokenizer().decode(marked) == "yo<end>"


def test_reloading_from_its_own_folder_changes_nothing(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.get_vocab() == byte_tokenizer().get_vocab()
    assert [reloaded.encode(text) for text in TEXTS] == [byte_tokenizer().encode(text) for text in TEXTS]
    assert reloaded.chat_template == byte_tokenizer().chat_template
    assert reloaded.special_tokens_map == byte_tokenizer().special_tokens_map


@pytest.mark.parametrize("family", ["qwen2", "llama", "phi3"])
def test_beside_a_model_the_ids_stay_the_same(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / family, family)
    ours = load_tokenizer(Model(id=str(folder)))
    assert [ours.encode(text) for text in TEXTS] == [byte_tokenizer().encode(text) for text in TEXTS]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("née 日本") == byte_tokenizer().encode("née 日本")
    check_vocabulary(theirs, 264)


def test_unk_comes_before_eos_as_padding() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    give_pad_token(tokenizer)
    assert tokenizer.pad_token == tokenizer.unk_token
    tokenizer.pad_token = tokenizer.unk_token = None
    give_pad_token(tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token


def test_a_vocabulary_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(UsageError, match="embeds only 200 tokens"):
        check_vocabulary(byte_tokenizer(), 200)


def test_an_unknown_builtin_is_named() -> None:
    with pytest.raises(UsageError, match="builtin:words"):
        load_tokenizer(Model(id="builtin:tiny", tokenizer="builtin:words"))


def test_a_chat_template_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    tokenizer = load_tokenizer(Model(id="builtin:tiny", chat_template=str(tmp_path / "own.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_special_tokens_of_the_recipe_take_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<begin>": 3, "<|im_end|>": 4, "a": 5}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    own = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    own.save_pretrained(tmp_path)
    special: Any = {"bos": "<begin>", "eos": "<|im_end|>"}
    made = load_tokenizer(Model(id="builtin:tiny", tokenizer=str(tmp_path), special_tokens=special))
    assert made("a")["input_ids"] == [3, 5] and made.eos_token_id == 4
    assert load_tokenizer(Model(id="builtin:tiny", tokenizer=str(tmp_path)))("a")["input_ids"] == [1, 5]
    made.save_pretrained(tmp_path / "result")
    again = load_tokenizer(Model(id="builtin:tiny", tokenizer=str(tmp_path / "result")))
    assert again("a")["input_ids"] == [3, 5] and again.eos_token_id == 4
    with pytest.raises(UsageError, match=r"special_tokens\.eos = '<missing>', which the tokenizer does not have"):
        load_tokenizer(Model(id="builtin:tiny", special_tokens={"eos": "<missing>"}))


def test_an_added_token_may_be_the_special_one() -> None:
    made = load_tokenizer(Model(id="builtin:tiny", add_tokens=["<stop>"], special_tokens={"eos": "<stop>"}))
    assert made.eos_token == "<stop>" and made.eos_token_id == 264
