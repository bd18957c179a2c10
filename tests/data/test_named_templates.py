"""Chat templates by name: chosen by the tokens that exist, learned with one end for each answer, saved with results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.data.chat_template import end_of_turn
from engine.data.prepare import prepare_data
from engine.errors import UsageError
from engine.model.named_templates import NAMED, named_template
from tests.data.specs import run_spec, tokenizer

TURNS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Snow?"},
    {"role": "assistant", "content": "No."},
]
LOOKS = {
    "chatml": ("<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n", "Yes.<|im_end|>"),
    "llama3": (
        "<bos><|start_header_id|>user<|end_header_id|>\n\nRain?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Yes.<|eot_id|>",
    ),
    "gemma": ("<bos><start_of_turn>user\nRain?<end_of_turn>\n<start_of_turn>model\n", "Yes.<end_of_turn>"),
    "phi3": ("<|user|>\nRain?<|end|>\n<|assistant|>\n", "Yes.<|end|>"),
    "mistral": ("<bos>[INST]Rain?[/INST]", "Yes.<eos>"),
    "plain": ("User: Rain?\nAssistant: ", "Yes.<eos>"),
}


def base(name: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer without a template, with the tokens of a named one."""
    made = tokenizer("")
    made.add_special_tokens({"additional_special_tokens": [*made.all_special_tokens[3:], *NAMED[name].tokens]})
    return made


def test_every_name_is_tried() -> None:
    assert set(LOOKS) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_prompt_and_answer_have_the_familys_layout_and_each_answer_is_learned_with_its_end(
    name: str, jsonl: Callable[..., str]
) -> None:
    made, (prompt, answer) = base(name), LOOKS[name]
    made.chat_template = named_template(name, made)
    assert made.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True) == prompt
    assert str(made.apply_chat_template(TURNS[:2], tokenize=False)).startswith(prompt + answer)
    (row,) = prepare_data(run_spec({"sources": [{"name": "a", "path": jsonl([{"messages": TURNS}])}]}), made).train
    assert made.decode(row.labels[row.labels != -100]) == answer + answer.replace("Yes.", "No.")
    assert end_of_turn(made) == made.convert_tokens_to_ids(answer.removeprefix("Yes."))


def test_a_name_whose_tokens_are_missing_is_refused_with_those_that_fit() -> None:
    with pytest.raises(
        UsageError, match="does not have the tokens <|im_start|>, <|im_end|>".replace("|", r"\|")
    ) as caught:
        named_template("chatml", tokenizer(""))
    assert "plain" in caught.value.render()
    with pytest.raises(UsageError) as caught:
        named_template("chatml", base("llama3"))
    assert "llama3" in caught.value.render()


def test_the_template_travels_with_the_tokenizer(tmp_path: object) -> None:
    made = base("chatml")
    made.chat_template = named_template("chatml", made)
    made.save_pretrained(str(tmp_path))
    assert AutoTokenizer.from_pretrained(str(tmp_path)).chat_template == NAMED["chatml"].text
