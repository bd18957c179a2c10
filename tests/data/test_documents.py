"""Text as documents: a file, a paragraph, a line, or what a separator ends; long ones in pieces, and no token lost."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.data import documents
from engine.data.batch import collate
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokenise import piece_spans
from engine.errors import DataError
from tests.data.specs import run_spec, tokenizer

Write = Callable[..., str]


def prepared(path: str, source: dict[str, Any] | None = None, **data: Any) -> PreparedData:
    return prepare_data(run_spec({"sources": [{"name": "a", "path": path, **(source or {})}], **data}), tokenizer())


def corpus(folder: Path) -> dict[str, str]:
    """Files of paragraphs, some longer than a sequence, in letters of one to four bytes."""
    draw = random.Random(3)
    folder.mkdir()
    texts = {}
    for name in ("a.txt", "b.md", "c.txt"):
        paragraphs = ["".join(draw.choices("abé日🙂 \n", k=draw.randint(1, 90))).strip() or "x" for _ in range(9)]
        texts[name] = "\n\n".join(paragraph.replace("\n\n", "\n") for paragraph in paragraphs)
        (folder / name).write_text(texts[name], encoding="utf-8")
    return texts


def test_no_token_of_a_corpus_is_lost(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "corpus")
    found = prepared(str(tmp_path / "corpus"), max_length=50, shuffle=False)
    end = tokenizer().eos_token_id
    whole = [token for text in texts.values() for token in [*text.encode(), end]]
    assert [int(token) for row in found.train for token in row.input_ids] == whole
    assert found.train.lengths.max() <= 50
    assert found.report.sources[0].dropped == {}
    packed = prepared(str(tmp_path / "corpus"), max_length=50, packing=True)
    assert int(packed.train.lengths.sum()) == len(whole)


def test_every_token_but_the_first_of_a_document_is_learned_with_an_overlap(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "corpus")
    found = prepared(str(tmp_path / "corpus"), max_length=50, overlap=7)
    assert int(found.train.target_counts.sum()) == sum(len(text.encode()) for text in texts.values())


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("file", ["one\ntwo\n\nthree<sep>four"]),
        ("line", ["one", "two", "three<sep>four"]),
        ("paragraph", ["one\ntwo", "three<sep>four"]),
        ("<sep>", ["one\ntwo\n\nthree", "four"]),
    ],
)
def test_the_unit_says_what_a_document_is(unit: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n\nthree<sep>four")
    with gzip.open(tmp_path / "t.txt.gz", "wt") as stream:
        stream.write("one\ntwo\n\nthree<sep>four")
    for name in ("t.txt", "t.txt.gz"):
        found = prepared(str(tmp_path / name), {"unit": unit})
        assert [tokenizer().decode(row.input_ids[:-1]) for row in found.train if len(row.input_ids) > 1] == expected
        assert all(row.input_ids[-1] == tokenizer().eos_token_id for row in found.train)


def test_a_long_document_is_read_in_parts_and_separators_are_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 16)
    text = "née日🙂 word\nlonger than a part of it " * 5
    (tmp_path / "t.txt").write_text(text + "<sep>" + text[::-1] + "<sep><sep>short", encoding="utf-8")
    found = prepared(str(tmp_path / "t.txt"), {"unit": "<sep>"}, packing=False)
    said = str(tokenizer().decode([int(token) for row in found.train for token in row.input_ids]))
    assert said == f"{text}<eos>{text[::-1]}<eos>short<eos>"


def test_pieces_hold_each_token_once_and_none_is_a_single_token() -> None:
    for count in range(5, 60):
        for overlap in (0, 2):
            spans = piece_spans(count, 8, overlap)
            assert all(2 <= stop - start <= 8 for start, stop in spans)
            fresh = [range(start + (overlap if start else 0), stop) for start, stop in spans]
            assert [token for span in fresh for token in span] == list(range(count))


def test_a_long_row_of_a_table_is_split_and_dropped_where_that_is_said(jsonl: Write) -> None:
    path = jsonl([{"text": "a" * 30}, {"text": "bcd"}])
    split = prepared(path, max_length=10)
    assert split.train.lengths.tolist() == [10, 10, 9, 2, 4]
    assert split.report.sources[0].chat == {"split": 1, "pieces": 4}
    assert prepared(path, max_length=10, over_length="drop").train.lengths.tolist() == [4]


def test_text_that_is_not_utf8_names_the_file_and_a_way(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("née".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        prepared(str(tmp_path / "t.txt"))
    assert "iconv -f windows-1252" in caught.value.render()


def test_a_unit_of_a_table_is_refused(jsonl: Write) -> None:
    with pytest.raises(DataError, match="the files are tables"):
        prepared(jsonl([{"text": "a"}]), {"unit": "paragraph"})


def test_packed_loss_of_pieces_equals_that_of_the_pieces_alone(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).double()
    losses = []
    for packing in (True, False):
        rows = prepared(str(tmp_path / "corpus"), max_length=50, packing=packing).train
        batch = collate(rows, range(len(rows)), pad_id=258)
        with torch.no_grad():
            logits_BSV = model(
                batch.input_ids_BS,
                attention_mask=batch.attention_mask_BS,
                position_ids=batch.position_ids_BS,
                use_cache=False,
            ).logits
        flat = logits_BSV[:, :-1].flatten(0, 1)
        targets = batch.labels_BS[:, 1:].flatten()
        losses.append(torch.nn.functional.cross_entropy(flat, targets, reduction="sum", ignore_index=-100))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)
