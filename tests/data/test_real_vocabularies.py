"""The ways to write a row on real vocabularies with stock templates: tokens and label mask equal an independent
rendering.

The vocabularies are those of tests/vocabularies.py, the templates those of the package `trl`. Where one is missing,
nothing here is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from engine.data.prepare import prepare_data
from engine.model.named_templates import NAMED, named_template
from tests.data.specs import run_spec
from tests.data.test_stock_templates import FOLDER, template
from tests.vocabularies import missing, vocabulary

FAMILIES = {"qwen2": "qwen2_5", "llama-bpe": "llama3_1"}
"""The template of each vocabulary."""

MISSING = "".join(map(missing, FAMILIES)) or ("" if FOLDER.is_dir() else "trl is not installed")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

Write = Callable[..., str]

QUESTION, ANSWER = "Où est Bergen?\n\n2 lines, 日本 🙂", "In Norway, née Bjørgvin: 12345 mm of rain."
ASKED, ANSWERED = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
SYSTEM = {"role": "system", "content": "Be brief."}


def templated(name: str) -> PreTrainedTokenizerBase:
    made = vocabulary(name)
    made.chat_template = template(FAMILIES[name])
    return made


def learned_rows(made: PreTrainedTokenizerBase, path: str, **source: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each row."""
    rows = prepare_data(run_spec({"sources": [{"name": "a", "path": path, **source}]}), made).train
    return [(row.input_ids.tolist(), row.labels.tolist()) for row in rows]


def expected(made: PreTrainedTokenizerBase, asked: list[dict[str, str]], answer: str) -> tuple[list[int], list[int]]:
    """The inference prompt, then the rest of what transformers renders; labels up to the end of the turn."""
    prompt: Any = made.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    whole: Any = made.apply_chat_template([*asked, {"role": "assistant", "content": answer}], return_dict=False)
    assert whole[: len(prompt)] == prompt
    end = next(place for place in range(len(whole) - 1, 0, -1) if whole[place] in made.added_tokens_decoder)
    return whole, [token if len(prompt) <= place <= end else -100 for place, token in enumerate(whole)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_to_write_a_row_equals_transformers_rendering(name: str, jsonl: Write) -> None:
    made = templated(name)
    rows: list[dict[str, Any]] = [
        {"messages": [SYSTEM, ASKED, ANSWERED]},
        {
            "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}],
            "system": "Be brief.",
        },
        {"prompt": QUESTION, "completion": ANSWER, "system": "Be brief."},
        {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]},
        {"instruction": QUESTION, "output": ANSWER, "system": "Be brief."},
    ]
    for number, row in enumerate(rows):
        assert learned_rows(made, jsonl([row], f"{number}.jsonl")) == [expected(made, [SYSTEM, ASKED], ANSWER)], row


@pytest.mark.parametrize("name", FAMILIES)
def test_history_is_earlier_turns(name: str, jsonl: Write) -> None:
    made = templated(name)
    path = jsonl([{"instruction": QUESTION, "output": ANSWER, "history": [["Hi?", "Yes."]]}])
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}, ASKED]
    ((ids, labels),) = learned_rows(made, path)
    assert (ids, labels[-9:]) == (expected(made, turns, ANSWER)[0], expected(made, turns, ANSWER)[1][-9:])
    assert "Yes." in str(made.decode([label for label in labels if label != -100]))


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_rows_and_text_are_their_tokens_and_an_end(name: str, jsonl: Write, tmp_path: Path) -> None:
    made = templated(name)
    asked, answered = (made(text, add_special_tokens=False)["input_ids"] for text in (QUESTION, ANSWER))
    ((ids, labels),) = learned_rows(made, jsonl([{"prompt": QUESTION, "completion": ANSWER}]), template="none")
    assert ids == [*asked, *answered, made.eos_token_id]
    assert labels == [-100] * len(asked) + [*answered, made.eos_token_id]
    (tmp_path / "t.txt").write_text(QUESTION, encoding="utf-8")
    ((ids, labels),) = learned_rows(made, str(tmp_path / "t.txt"))
    assert ids == [*asked, made.eos_token_id] and labels == [-100, *ids[1:]]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_of_a_corpus_is_lost(name: str, tmp_path: Path) -> None:
    made, texts = templated(name), [f"{QUESTION} {number} {ANSWER}\n\n" * number for number in range(1, 9)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    spec = run_spec({"max_length": 64, "sources": [{"name": "a", "path": f"{tmp_path}/*.txt"}]})
    lengths = prepare_data(spec, made).train.lengths
    assert int(lengths.sum()) == sum(len(made(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts)


def test_a_named_template_fits_the_vocabulary_that_has_its_tokens() -> None:
    fits = {"qwen2": {"chatml", "plain"}, "llama-bpe": {"llama3", "plain"}}
    for name, names in fits.items():
        made = vocabulary(name)
        assert {each for each in NAMED if all(token in made.get_vocab() for token in NAMED[each].tokens)} == names
        assert named_template(sorted(names)[0], made)
