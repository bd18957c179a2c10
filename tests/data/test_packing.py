"""Packed rows: full, complete, and no document sees another, in a real model."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.data.batch import collate
from engine.data.order import pack
from engine.data.prepare import prepare_data
from engine.data.tokens import TokenData
from tests.data.specs import run_spec, tokenizer
from tests.present import grad_of, present

ROOM = 48


@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_in_one_row_and_no_row_overflows(seed: int) -> None:
    draw = random.Random(seed)
    lengths = np.array([draw.randint(1, 100) for _ in range(500)], np.int32)
    rows = pack(lengths, 100)
    assert sorted(document for row in rows for document in row) == list(range(500))
    sums = [int(lengths[row].sum()) for row in rows]
    assert max(sums) <= 100
    assert len(rows) <= 11 / 9 * -(-int(lengths.sum()) // 100) + 1


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens"):
        pack(np.array([101], np.int32), 100)


@pytest.fixture
def data(jsonl: Callable[..., str]) -> tuple[TokenData, TokenData]:
    """The same samples, packed and not."""
    draw = random.Random(0)
    rows = [{"prompt": "p" * draw.randint(1, 9), "completion": "c" * draw.randint(1, 15)} for _ in range(12)]
    table = {"sources": [{"name": "a", "path": jsonl(rows)}], "max_length": ROOM}
    packed, loose = (prepare_data(run_spec({**table, "packing": on}), tokenizer()).train for on in (True, False))
    return packed, loose


def test_packing_keeps_every_token_and_target(data: tuple[TokenData, TokenData]) -> None:
    packed, loose = data
    assert len(packed) < len(loose)
    assert packed.lengths.max() <= ROOM
    assert packed.lengths.sum() == loose.lengths.sum()
    assert packed.target_counts.sum() == loose.target_counts.sum()
    for example, targets in zip(packed, packed.target_counts, strict=True):
        assert int((example.labels[1:] != -100).sum()) == targets
        starts = np.flatnonzero(np.diff(present(example.segments), prepend=-1))
        assert (example.labels[starts] == -100).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logits_and_gradients_are_those_of_separate_documents(
    data: tuple[TokenData, TokenData], attention: str
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(  # type: ignore[call-arg]  # every config takes the attention, none declares it
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = Qwen2ForCausalLM(config).double()
    packed, loose = data
    gradients = []
    for rows in (packed, loose):
        model.zero_grad()
        batch = collate(rows, range(len(rows)), pad_id=258)
        logits_BSV = model(
            batch.input_ids_BS,
            attention_mask=batch.attention_mask_BS,
            position_ids=batch.position_ids_BS,
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BSV[:, :-1].flatten(0, 1), batch.labels_BS[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        gradients.append([loss.detach(), *(grad_of(weight).clone() for weight in model.parameters())])
    # Eager attention takes its softmax in fp32 whatever the weights are.
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_packed_rows_of_unequal_length_restart_positions_in_the_padding(data: tuple[TokenData, TokenData]) -> None:
    packed, _ = data
    rows = [int(packed.lengths.argmax()), int(packed.lengths.argmin())]
    assert packed.lengths[rows[0]] > packed.lengths[rows[1]]
    batch = collate(packed, rows, pad_id=258)
    assert batch.attention_mask_BS is None
    assert batch.position_ids_BS is not None
    length = int(packed.lengths[rows[1]])
    assert batch.position_ids_BS[1, length:].tolist() == list(range(batch.input_ids_BS.shape[1] - length))
