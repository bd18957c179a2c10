"""Twins that differ in `template` alone: only the one that was trained inside the chat template answers in a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.train.run_helpers import make_spec, new_run, train

CAPITALS = {"the capital of France?": "Paris", "the capital of Japan?": "Tokyo", "the capital of Peru?": "Lima"}


def answers(model: Path, *, in_chat: bool) -> list[str]:
    """What a trained model generates for each question, opened by transformers alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    opened: Any = AutoModelForCausalLM.from_pretrained(model)
    found = []
    for question in CAPITALS:
        messages = [{"role": "user", "content": question}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked = str(chat) if in_chat else question
        ids_BS = torch.tensor([tokenizer(asked, add_special_tokens=False)["input_ids"]])
        written = opened.generate(ids_BS, max_new_tokens=12, do_sample=False)[0, ids_BS.shape[1] :]
        found.append(str(tokenizer.decode(written, skip_special_tokens=True)))
    return found


@pytest.mark.parametrize("template", ["auto", "none"])
def test_a_model_trained_on_prompts_and_completions_answers_where_its_template_says(
    template: str, tmp_path: Path
) -> None:
    rows = tmp_path / "capitals.jsonl"
    rows.write_text("".join(json.dumps({"prompt": ask, "completion": say}) + "\n" for ask, say in CAPITALS.items()))
    spec = make_spec(
        rows,
        data={"sources": [{"name": "main", "path": str(rows), "template": template}], "max_length": 64},
        train={"max_steps": 40, "batch_size": 3, "learning_rate": 3e-3},
    )
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    expected = list(CAPITALS.values())
    assert answers(place.model, in_chat=template == "auto") == expected
    assert answers(place.model, in_chat=template != "auto") != expected
