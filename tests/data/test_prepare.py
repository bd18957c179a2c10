"""From files to tokens: masks, filters, splits, weights, the cache. Real files, the byte tokenizer."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.files.caches import keeps_all_lengths
from engine.data.batch import collate
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokenise import tokenizer_hash
from engine.errors import DataError
from tests.data.specs import CHATML, run_spec, tokenizer
from tests.present import present

Write = Callable[..., str]
PAIRS = [{"prompt": f"say {number}:", "completion": "x" * (1 + number % 9)} for number in range(40)]


def prepared(data: dict[str, Any], *, notify: Callable[[str], None] = lambda text: None, **keys: Any) -> PreparedData:
    return prepare_data(run_spec(data, **keys), tokenizer(), notify=notify)


def one(path: str, **keys: Any) -> list[dict[str, Any]]:
    return [{"name": "a", "path": path, **keys}]


def plain(path: str, **keys: Any) -> list[dict[str, Any]]:
    """Prompts and completions outside the chat template."""
    return one(path, template="none", **keys)


def texts(data: Any) -> list[str]:
    return [str(tokenizer().decode(example.input_ids.tolist())) for example in data]


def test_a_completion_is_learned_with_end_of_sequence_and_its_prompt_is_not(jsonl: Write) -> None:
    data = prepared({"sources": plain(jsonl([{"prompt": "ab", "completion": "cd"}]))}).train
    end = tokenizer().eos_token_id
    assert data[0].input_ids.tolist() == [97, 98, 99, 100, end]
    assert data[0].labels.tolist() == [-100, -100, 99, 100, end]
    assert (data.lengths.tolist(), data.target_counts.tolist()) == ([5], [3])


def test_loss_on_all_learns_the_prompt_but_never_the_first_token(jsonl: Write) -> None:
    path = jsonl([{"prompt": "ab", "completion": "c"}])
    assert prepared({"sources": plain(path), "loss_on": "all"}).train.target_counts.tolist() == [3]


def test_beginning_of_sequence_comes_once_where_the_tokenizer_adds_it(jsonl: Write) -> None:
    from tokenizers import processors

    made = tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", made.bos_token_id), ("<eos>", made.eos_token_id)]
    )
    path = jsonl([{"prompt": "a", "completion": "b"}])
    ids = prepare_data(run_spec({"sources": plain(path)}), made).train[0].input_ids.tolist()
    assert ids == [made.bos_token_id, 97, 98, made.eos_token_id]


def test_target_counts_are_those_of_the_labels_after_the_shift(jsonl: Write) -> None:
    data = prepared({"sources": one(jsonl([{"text": "hello"}, {"text": "a b c"}]))}).train
    assert [int((example.labels[1:] != -100).sum()) for example in data] == data.target_counts.tolist() == [5, 5]


def test_samples_too_long_are_dropped_and_counted(jsonl: Write) -> None:
    data = {"sources": plain(jsonl(PAIRS)), "max_length": 12}
    result = prepared(data)
    assert not keeps_all_lengths(run_spec(data).recipe)
    longer = {**data, "max_length": 64}
    prepared(longer)
    assert keeps_all_lengths(run_spec(longer).recipe)
    (count,) = result.report.sources
    assert result.train.lengths.max() <= 12
    assert (count.read, count.kept) == (40, len(result.train))
    assert count.dropped == {"longer than data.max_length": 40 - len(result.train)}


def test_truncation_cuts_on_the_right_and_drops_what_has_no_target_left(jsonl: Write) -> None:
    rows = [{"prompt": "p" * 20, "completion": "c"}, {"prompt": "p", "completion": "c" * 20}]
    result = prepared({"sources": plain(jsonl(rows)), "max_length": 8, "over_length": "truncate"})
    assert texts(result.train) == ["p" + "c" * 7]
    assert result.report.sources[0].dropped == {"no target token once cut to data.max_length": 1}
    assert result.report.sources[0].truncated == 1
    with pytest.raises(DataError) as refused:
        prepared({"sources": plain(jsonl(rows[:1])), "max_length": 8, "over_length": "truncate"})
    assert refused.value.fix == "raise data.max_length: all target tokens are beyond it"
    assert len(prepared({"sources": plain(jsonl(rows[:1])), "max_length": 64, "over_length": "truncate"}).train) == 1


def test_broken_rows_are_counted_by_reason(jsonl: Write) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}, {"prompt": "a", "completion": 3.5}]
    assert prepared({"sources": one(jsonl(rows))}).report.sources[0].dropped == {
        "completion is missing": 1,
        "completion is not text": 1,
    }


def test_nothing_left_to_learn_is_a_data_error_that_says_why(jsonl: Write, own_cache: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}] * 3
    with pytest.raises(DataError, match="3 x no target token") as caught:
        prepared({"sources": one(jsonl(rows))})
    assert caught.value.exit_code == 5
    assert not [path for path in (own_cache / "tokens").iterdir() if path.is_dir()]


def test_conversations_take_the_tokenizers_template_and_the_system_prompt(jsonl: Write) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
    spec = run_spec({"sources": one(jsonl(rows)), "system_prompt": "short"})
    data = prepare_data(spec, tokenizer(CHATML)).train
    assert texts(data) == ["<user>system\nshort<end>\n<user>user\nhi<end>\n<user>assistant\nyo<end>\n"]
    assert data.target_counts.tolist() == [3]


def test_sources_are_joined_in_order_and_switched_off(jsonl: Write) -> None:
    first, second = jsonl([{"text": "one"}], "1.jsonl"), jsonl([{"text": "two"}], "2.jsonl")
    both: list[dict[str, Any]] = [{"name": "a", "path": first, "weight": 2.5}, {"name": "b", "path": second}]
    data = prepared({"sources": both}).train
    assert texts(data) == ["one<eos>", "two<eos>"]
    assert (data.source_of.tolist(), data.weights.tolist()) == ([0, 1], [2.5, 1.0])
    assert texts(prepared({"sources": [{**both[0], "enabled": False}, both[1]]}).train) == ["two<eos>"]
    with pytest.raises(DataError, match="is disabled"):
        prepared({"sources": [{**each, "enabled": False} for each in both]})


def test_the_validation_split_is_exact_and_moved_by_the_seed_alone(jsonl: Write) -> None:
    base = {"sources": one(jsonl(PAIRS)), "valid_fraction": 0.25}
    result = prepared(base)
    assert result.validation is not None
    assert (len(result.train), len(present(result.validation))) == (30, 10)
    held = set(result.validation.documents.tolist())
    assert held.isdisjoint(result.train.documents.tolist())
    unshuffled = prepared({**base, "shuffle": False}, train={"batch_size": 3})
    assert held == set(present(unshuffled.validation).documents.tolist())
    assert held == set(present(prepared({**base, "max_length": 100}).validation).documents.tolist())
    assert held != set(present(prepared(base, train={"seed": 1}).validation).documents.tolist())


def test_a_split_of_very_few_samples_keeps_one_on_each_side_or_fails(jsonl: Write) -> None:
    result = prepared({"sources": one(jsonl(PAIRS[:2])), "valid_fraction": 0.01})
    assert (len(result.train), len(present(result.validation))) == (1, 1)
    with pytest.raises(DataError, match="nothing to train on"):
        prepared({"sources": one(jsonl(PAIRS[:1], "1.jsonl")), "valid_fraction": 0.5})


def test_a_validation_set_of_its_own_is_used(jsonl: Write) -> None:
    validation = [{"name": "v", "path": jsonl([{"text": "judge"}], "v.jsonl")}]
    result = prepared({"sources": one(jsonl(PAIRS)), "validation": validation})
    assert texts(result.validation) == ["judge<eos>"]
    assert result.report.validation_sources[0].name == "v"


def test_workers_give_the_same_tokens(jsonl: Write, own_cache: Path) -> None:
    data = {"sources": one(jsonl(PAIRS * 20)), "max_length": 12}
    alone = prepared(data)
    expected = [example.input_ids.tolist() for example in alone.train]
    shutil.rmtree(own_cache / "tokens")
    helped = prepared({**data, "workers": 2})
    assert [example.input_ids.tolist() for example in helped.train] == expected
    assert helped.fingerprint == alone.fingerprint
    assert helped.report.as_json() == alone.report.as_json()


def test_the_fingerprint_is_stable_and_follows_what_matters(jsonl: Write, own_cache: Path, tmp_path: Path) -> None:
    path = jsonl(PAIRS)
    first = prepared({"sources": plain(path)}).fingerprint
    moved = tmp_path / "moved.jsonl"
    shutil.copy(path, moved)
    shutil.rmtree(own_cache)
    assert prepared({"sources": plain(str(moved))}, train={"seed": 4, "batch_size": 2}).fingerprint == first
    changes: list[dict[str, Any]] = [
        {"sources": plain(path, limit=39)},
        {"sources": plain(path, weight=2.0)},
        {"sources": plain(path), "max_length": 9},
        {"sources": plain(path), "loss_on": "all"},
        {"sources": one(path)},
        {"sources": plain(path), "valid_fraction": 0.5},
    ]
    assert len({first, *(prepared(change).fingerprint for change in changes)}) == 7


def test_the_tokenizers_hash_ignores_padding_and_follows_special_tokens() -> None:
    base, padded = tokenizer(), tokenizer()
    padded(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(base) == tokenizer_hash(padded)
    other = tokenizer()
    other.eos_token = "<end>"
    assert len({tokenizer_hash(base), tokenizer_hash(other), tokenizer_hash(tokenizer(CHATML))}) == 3


def cached_entry(own_cache: Path) -> Path:
    (entry,) = [path for path in (own_cache / "tokens").iterdir() if path.is_dir()]
    return entry


def test_a_second_run_reads_the_cache_without_writing_it(jsonl: Write, own_cache: Path) -> None:
    data = {"sources": one(jsonl(PAIRS))}
    first = prepared(data)
    before = {path.name: path.stat().st_mtime_ns for path in cached_entry(own_cache).iterdir()}
    again = prepared(data)
    assert {path.name: path.stat().st_mtime_ns for path in cached_entry(own_cache).iterdir()} == before
    assert isinstance(again.train.columns.ids.base, np.memmap)
    assert texts(again.train) == texts(first.train)
    assert again.report.as_json() == first.report.as_json()


@pytest.mark.parametrize("name", ["ids.npy", "targets.npy", "offsets.npy", "drops.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_cache_is_noticed_and_built_again(jsonl: Write, own_cache: Path, name: str, how: str) -> None:
    data = {"sources": one(jsonl(PAIRS[:3]))}
    expected = texts(prepared(data).train)
    victim = cached_entry(own_cache) / name
    raw = victim.read_bytes()
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(raw[:-1] if how == "cut" else raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
    said: list[str] = []
    assert texts(prepared(data, notify=said.append).train) == expected
    assert any("damaged" in line for line in said)


def test_two_processes_at_once_share_one_build(jsonl: Write, own_cache: Path) -> None:
    path = jsonl(PAIRS * 50)
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        prints = pool.map(_prepare_and_fingerprint, [path, path])
    assert len(set(prints)) == 1
    assert cached_entry(own_cache)
    assert not list((own_cache / "tokens").glob(".*-*"))


def _prepare_and_fingerprint(path: str) -> str:
    return prepared({"sources": one(path)}).fingerprint


def test_collate_pads_on_the_right_and_only_where_needed(jsonl: Write) -> None:
    data = prepared({"sources": one(jsonl([{"text": "abc"}, {"text": "a"}, {"text": "xyz"}]))}).train
    batch = collate(data, [0, 1], pad_id=7)
    assert batch.input_ids_BS.tolist()[1][2:] == [7, 7]
    assert batch.labels_BS.tolist()[1] == [-100, tokenizer().eos_token_id, -100, -100]
    assert batch.attention_mask_BS is not None
    assert batch.attention_mask_BS.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert (batch.sample_ids, batch.target_tokens, batch.position_ids_BS) == ((0, 1), 4, None)
    assert collate(data, [0, 2], pad_id=7).attention_mask_BS is None
