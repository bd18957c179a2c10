"""Generated answers: sampling keyed by seed and sample, prompts that end where the answer starts, unsmoothed losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.schema.recipe import Generate
from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from engine.evaluate.generation import KeyedDraw, end_tokens, generate
from engine.model.decoder import eval_mode
from engine.model.loss import make_loss
from tests.data.chat_families import END_OF_TEXT
from tests.data.specs import CHATML, LLAMA_LIKE, tokenizer
from tests.data.specs import run_spec as data_spec
from tests.model.samples import batch_of, cpu, load, run_spec

PROMPTS = [[65, 66, 67], [70, 71], [80, 81, 82, 83, 84], [90, 91]]


def answers(samples: list[int], **settings: Any) -> list[list[int]]:
    loaded = load(run_spec(init="random", tokenizer="builtin:bytes"))
    asked = Generate.model_validate({"max_new_tokens": 8, "temperature": 1.0, **settings})
    with eval_mode(loaded.model):
        return generate(loaded, [PROMPTS[number] for number in samples], samples, asked)


ENDS = {257, 262}
"""<eos> and <end> of the byte tokenizer."""


def cut(tokens: list[int]) -> list[int]:
    """The answer up to its end; what follows is padding."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in ENDS), None)]


def test_an_answer_depends_on_seed_and_sample_and_not_on_the_batch() -> None:
    together = [cut(answer) for answer in answers([0, 1, 2, 3])]
    apart = [cut(answers([number])[0]) for number in (3, 2, 1, 0)]
    assert together == apart[::-1]
    assert together != [cut(answer) for answer in answers([0, 1, 2, 3], seed=1)]


def test_an_answer_ends_at_the_end_of_turn_that_the_chat_template_writes() -> None:
    made = answers([0, 1, 2, 3], max_new_tokens=100)
    ended = [tokens for tokens in made if 262 in tokens]
    assert ended
    assert all(set(tokens[tokens.index(262) + 1 :]) <= {258} for tokens in ended)


@pytest.mark.parametrize(
    ("template", "named", "ends"),
    [
        (CHATML, None, [257, 262]),
        (LLAMA_LIKE, None, [257, 262]),
        (END_OF_TEXT, None, [257, 262]),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", None, [257]),
        ("{{ raise_exception('no') }}", [263, 65], [257, 263]),
        ("", 263, [257, 263]),
    ],
)
def test_end_tokens_are_those_of_tokenizer_template_and_model(template: str, named: Any, ends: list[int]) -> None:
    loaded = load(run_spec(init="random", tokenizer="builtin:bytes"))
    loaded.tokenizer = tokenizer(template)
    loaded.base.generation_config.eos_token_id = named
    assert end_tokens(loaded) == ends


def test_draws_follow_the_distribution() -> None:
    chances = torch.tensor([0.5, 0.3, 0.2, 0.0])
    scores_BV = chances.log().expand(4000, -1).clone()
    draw = KeyedDraw(7, range(4000), 1, 1, cpu())
    chosen = draw(torch.zeros((4000, 1), dtype=torch.long), scores_BV).argmax(-1)
    shares = torch.bincount(chosen, minlength=4) / 4000
    assert torch.allclose(shares, chances, atol=0.03)
    assert shares[3] == 0


def test_top_k_and_top_p_leave_the_likeliest_token() -> None:
    greedy = answers([0, 1], temperature=0.0)
    assert answers([0, 1], temperature=5.0, top_k=1) == greedy
    assert answers([0, 1], temperature=1.0, top_p=1e-6) == greedy
    assert answers([0, 1], temperature=5.0) != greedy


CHAT = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "ok"))]


def questions(folder: Path, row: dict[str, Any], loss_on: str, **data: Any) -> tuple[list[int], list[int]]:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    spec = data_spec({"sources": [{"name": "one", "path": str(path)}], "loss_on": loss_on, **data})
    train: TokenData = prepare_data(spec, tokenizer()).train
    return train.split_question(0)


@pytest.mark.parametrize(
    "row", [{"prompt": "abc", "completion": "de"}, {"messages": CHAT[:2]}, {"messages": CHAT}, {"text": "abcdefgh"}]
)
def test_a_prompt_ends_where_the_answer_starts_whatever_is_learned(tmp_path: Path, row: dict[str, Any]) -> None:
    assert questions(tmp_path, row, "all") == questions(tmp_path, row, "completion")
    prompt, answer = questions(tmp_path, row, "all")
    assert len(prompt) > 1 and answer


def test_the_prompt_of_plain_text_is_its_first_half(tmp_path: Path) -> None:
    prompt, answer = questions(tmp_path, {"text": "abcdefg"}, "completion")
    assert (prompt, answer) == (list(b"abcd"), [*b"efg", 257])


def test_an_answer_that_was_cut_off_leaves_the_second_half(tmp_path: Path) -> None:
    row = {"prompt": "abcdefgh", "completion": "de"}
    prompt, answer = questions(tmp_path, row, "all", max_length=6, over_length="truncate")
    assert (prompt, answer) == ([260, *b"ab"], list(b"cde"))


def test_label_smoothing_smooths_training_only() -> None:
    loaded, batch = load(run_spec(init="random", tokenizer="builtin:bytes")), batch_of()
    plain, smoothed = (
        make_loss(loaded, implementation="chunked", label_smoothing=share, chunk_tokens=None, device=cpu())
        for share in (0.0, 0.3)
    )
    assert float(plain(batch)) != float(smoothed(batch))
    with eval_mode(loaded.model):
        assert float(plain(batch)) == float(smoothed(batch))
