"""Merging: the merged model gives the same answers without peft; no half-written result remains; too little memory is
reported before anything is loaded."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessorList

from benchmarks.type_cell import write_tiny
from benchmarks.type_configs import tiny_config
from engine.commands.handover import merge as merge_command
from engine.errors import EnvironmentProblem, MemoryExhaustedError, UsageError
from engine.extras.handover.merge import Bases, _base, compare_logits, merge, merge_rounded_once
from engine.journal.directory import RunDirectory
from engine.model.reference import base_of_adapter
from tests.model.samples import batch_of, disturb, load, logits_of, name_base, run_spec, write_model
from tests.train.run_helpers import make_spec, new_run, train, write_samples


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    samples = write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl")
    spec = make_spec(samples, method={"kind": "lora"}, train={"max_steps": 3, "learning_rate": 0.05})
    place = new_run(tmp_path_factory.mktemp("runs"), spec)
    assert train(place)[0] == 0
    return place


def test_the_merged_model_answers_as_adapter_and_base_did(finished: RunDirectory, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    written = merge(finished.adapter, target, lambda text: None)
    base = AutoModelForCausalLM.from_pretrained(finished.adapter / "base")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(finished.adapter))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(target)(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, plain, atol=1e-3)
    assert written.size_bytes > (finished.adapter / "base" / "model.safetensors").stat().st_size
    assert (target / "tokenizer.json").is_file()


def test_a_target_that_exists_is_left_alone(finished: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        merge(finished.adapter, tmp_path, lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_full_model_needs_no_merging(finished: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not contain an adapter"):
        merge(finished.adapter / "base", tmp_path / "merged", lambda text: None)


def test_too_little_memory_is_told_before_anything_is_loaded(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory = namedtuple("Memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(2**30, 2**10))
    said: list[str] = []
    with pytest.raises(MemoryExhaustedError, match="host memory"):
        merge(finished.adapter, tmp_path / "merged", said.append)
    assert not said and not list(tmp_path.iterdir())


def test_without_a_result_the_fix_merges_the_newest_checkpoint(finished: RunDirectory, tmp_path: Path) -> None:
    unfinished = tmp_path / "runs" / finished.name
    shutil.copytree(finished.path, unfinished)
    shutil.rmtree(unfinished / "adapter")
    for checkpoint in (None, "77"):
        with pytest.raises(UsageError, match="no result yet" if checkpoint is None else "no checkpoint 77") as caught:
            merge_command(str(unfinished), checkpoint=checkpoint)
        words = shlex.split(caught.value.fix)
        assert words[:4] == ["tunedeck", "merge", str(unfinished), "--checkpoint"] and len(words) == 5
    merge_command(str(unfinished), checkpoint=words[4])
    assert (unfinished / "merged" / "model.safetensors").is_file()
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UsageError, match="no result yet") as caught:
        merge_command(str(unfinished))
    assert caught.value.fix == f"tunedeck resume {unfinished}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_merged_weight_is_w_plus_sba_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_model(tmp_path / "base", "qwen2")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    wrapped = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    factors = {}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for name, module in wrapped.get_base_model().named_modules():
            if hasattr(module, "lora_B"):
                module.lora_B["default"].weight.data.normal_(std=0.02)
                factors[name] = module.lora_B["default"].weight.float(), module.lora_A["default"].weight.float()
    after = merge_rounded_once(wrapped).state_dict()
    assert len(factors) == 4
    rounded_twice = 0
    for name, (b, a) in factors.items():
        old = before[f"{name}.weight"]
        expected = (old.float() + (b @ a) * 3.0).to(dtype)
        assert torch.equal(after[f"{name}.weight"], expected)
        rounded_twice += int((old + ((b @ a) * 3.0).to(dtype) != expected).sum())
    assert (rounded_twice > 0) == (dtype != torch.float32)  # the test can tell the two apart
    assert all(torch.equal(after[name], before[name]) for name in before if name.removesuffix(".weight") not in factors)


def test_the_difference_of_logits_is_told(finished: RunDirectory, tmp_path: Path) -> None:
    said: list[str] = []
    merge(finished.adapter, tmp_path / "merged", said.append)
    (told,) = [line for line in said if line.startswith("largest difference")]
    assert float(told.split(": ")[1].split()[0]) < 1e-4 and told.endswith("same next token on 5 of 5")


@pytest.fixture
def four_bit_adapter(tmp_path: Path) -> Path:
    """An adapter on a bf16 base in a folder."""
    folder = write_model(tmp_path / "base", "qwen2")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base.save_pretrained(folder)
    load(run_spec()).tokenizer.save_pretrained(tmp_path / "adapter")
    wrapped = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def test_a_4_bit_base_can_be_merged_both_ways_and_both_differences_are_told(
    four_bit_adapter: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="merging onto a 4-bit base needs bitsandbytes")
    base = str(tmp_path / "base")
    seen = PeftModel.from_pretrained(_base(base, None, base, False, four_bit=True), str(four_bit_adapter))
    differences = []
    for dequantized in (False, True):
        said: list[str] = []
        target = tmp_path / f"merged-{dequantized}"
        merge(four_bit_adapter, target, said.append, bases=Bases(True, dequantized))
        (told,) = [line for line in said if line.startswith("largest difference of logits from")]
        differences.append([float(part.split()[-1]) for part in re.findall(r"[\d.e-]+(?= merged onto)", told)])
        ids = torch.arange(12)[None]
        merged = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        assert "quantization_config" not in json.loads((target / "config.json").read_text())
        with torch.no_grad():
            off = float((merged(ids).logits - seen(ids).logits).abs().max())
        assert off < 0.01 if dequantized else off > 0.02
    assert differences[0] == differences[1] and differences[0][0] > 2 * differences[0][1]


def test_dequantized_weights_are_those_of_a_4_bit_base_and_need_bitsandbytes(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="was not a 4-bit model"):
        merge_command(str(finished.path), out=tmp_path / "merged", onto="dequantized")
    monkeypatch.setattr("engine.extras.handover.merge.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="needs bitsandbytes"):
        merge(finished.adapter, tmp_path / "merged", lambda text: None, bases=Bases(True, True))
    said: list[str] = []
    merge(finished.adapter, tmp_path / "merged", said.append, bases=Bases(True))
    assert "because bitsandbytes is missing" in said[0] and (tmp_path / "merged" / "model.safetensors").is_file()


def test_another_model_is_no_merged_one() -> None:
    logits = [torch.arange(6.0).reshape(2, 3)]
    with pytest.raises(EnvironmentProblem, match="largest difference"):
        compare_logits(logits, [-logits[0]], has_routers=False)
    with pytest.raises(EnvironmentProblem, match="largest difference"):
        compare_logits(logits, [-logits[0]], has_routers=True)


def test_a_token_that_rounding_sends_to_another_expert_is_told_and_not_refused() -> None:
    logits = [torch.randn(5, 30)]
    other = [logits[0].clone()]
    other[0][2] *= -1
    with pytest.raises(EnvironmentProblem, match="largest difference"):
        compare_logits(logits, other, has_routers=False)
    told = compare_logits(logits, other, has_routers=True)
    assert f"{float((logits[0][2] * 2).abs().max()):.2g} (largest logit" in told


def test_a_local_base_is_named_and_found_by_the_run_where_it_has_moved(tmp_path: Path) -> None:
    base = write_model(tmp_path / "elsewhere" / "base", "qwen2")
    samples = write_samples(tmp_path / "samples.jsonl")
    model = {"id": str(base), "tokenizer": None, "init": "pretrained"}
    place = new_run(tmp_path / "runs", make_spec(samples, model=model, method={"kind": "lora"}, train={"max_steps": 1}))
    assert train(place)[0] == 0
    others = [file for file in place.adapter.rglob("*") if file.is_file() and file.name != "adapter_config.json"]
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in others)
    assert base_of_adapter(place.adapter) == (str(base), None)
    name_base(place.adapter, tmp_path / "where it was")
    assert base_of_adapter(place.adapter) == (str(base), None)
    merge(place.adapter, tmp_path / "merged", lambda text: None)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    shutil.copytree(place.adapter, tmp_path / "alone")
    config = tmp_path / "alone" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="does not name a base model"):
        merge(tmp_path / "alone", tmp_path / "again", lambda text: None)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_trained_embeddings_stay_tied_to_the_head_in_several_files(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.extras.handover.merge.SHARD_SIZE", "20KB")
    base = write_model(tmp_path / "base", family, tie_word_embeddings=True)
    loaded = load(run_spec(str(base), method={"also_train": ["lm_head", "model.embed_tokens"]}))
    disturb(loaded)
    loaded.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", base)
    merge(tmp_path / "adapter", tmp_path / "merged", lambda text: None)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.set_attn_implementation(loaded.attention)
    assert (
        merged.config.tie_word_embeddings and merged.get_output_embeddings().weight is merged.model.embed_tokens.weight
    )
    torch.testing.assert_close(logits_of(merged, batch_of()), logits_of(loaded.model, batch_of()), rtol=1e-4, atol=1e-5)


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def generated(model: Any, forced: dict[int, int]) -> int:
    """How many of six tokens a model generates by its own config, if it chooses `forced` at these places, and
    elsewhere a token that ends nothing."""

    def choose(ids_BS: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores_BV, -torch.inf)
        chosen[:, forced.get(ids_BS.shape[1] - 3, 7)] = 0.0
        return chosen

    made = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, logits_processor=LogitsProcessorList([choose]))
    return int(made.shape[1]) - 3


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_result_ends_answers_where_the_chat_template_does(tmp_path: Path, kind: str) -> None:
    base = write_model(tmp_path / "base", "qwen2", vocab_size=272)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    end: Any = tokenizer.convert_tokens_to_ids("<|im_end|>")
    loaded = load(run_spec(str(base), method={"kind": kind}))
    loaded.save(tmp_path / "result")
    saved = GenerationConfig.from_pretrained(tmp_path / "result")
    assert saved.eos_token_id == [257, end]
    if kind == "lora":
        config = tmp_path / "result" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
        merge(tmp_path / "result", tmp_path / "merged", lambda text: None)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / ("merged" if kind == "lora" else "result"))
    assert opened.generation_config.eos_token_id == [257, end]
    # transformers' own defaults stop at the end of a turn.
    assert generated(opened, {1: end}) == 2 and generated(opened, {}) == 6


def test_adapters_on_layers_that_share_a_weight_are_not_merged(tmp_path: Path) -> None:
    """Zamba's blocks of attention have one set of weights: what is added to it at one place is added at all."""
    base = write_tiny(tiny_config("zamba"), tmp_path / "base")
    loaded = load(run_spec(str(base)))
    assert any("the result cannot be merged; layers that share a weight" in each for each in loaded.notices)
    loaded.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", base)
    with pytest.raises(UsageError, match=r"share a weight .*one weight cannot absorb both"):
        merge(tmp_path / "adapter", tmp_path / "merged", lambda text: None)
    assert not (tmp_path / "merged").exists()
    loaded = load(run_spec(str(base), method={"exclude": ["shared_transf.**"]}))
    assert not any("cannot be merged" in each for each in loaded.notices)
