"""The twin of qwen2.5-7b-lora: fp16 LoRA of rank 128, and scores on a test file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from engine.config.load import dump_run_spec, load_run_spec, override
from engine.data.prepare import prepare_data
from engine.device.open import open_device
from engine.evaluate.run import score_model, score_run
from engine.journal.directory import RunDirectory
from engine.model.load import load_model
from engine.model.loaded import plain_name
from engine.model.tokenizer import load_tokenizer
from engine.train.run.setup import make_order
from tests.train.run_helpers import Event, new_run, of_kind, train
from tests.twins.twin import twin, write_model, write_pairs, write_profile

RECIPE, STEPS = "qwen2.5-7b-lora", 20


class Trained(NamedTuple):
    folder: Path
    run: RunDirectory
    steps: list[Event]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("qwen25")
    # Embeddings so large that the first step overflows in fp16 at the loss scale of 65,536.
    write_model(folder / "model", "qwen2", torch.float16, layers=1, embedding_std=80.0)
    write_pairs(folder / "train.jsonl", count=120, seed=1, form="( w / {0} )")
    write_pairs(folder / "public_test.jsonl", count=2, seed=2, form="( w / {0} )")
    run = new_run(folder / "runs", twin(RECIPE, folder))
    code, events = train(run)
    assert code == 0
    return Trained(folder, run, of_kind(events, "step"))


class Reference(NamedTuple):
    begun: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    skipped: list[int]


def reference(folder: Path) -> Reference:
    """The adapters that plain peft, torch's AdamW and GradScaler make of the same samples in the same order."""
    spec = twin(RECIPE, folder, kind="cpu")
    tokenizer = load_tokenizer(spec.recipe.model)
    data = prepare_data(spec, tokenizer).train
    order, _ = make_order(data, spec)
    model = _peft_model(
        folder, {name: p.detach().clone() for name, p in load_model(spec, open_device(spec), tokenizer).trainable()}
    )
    parameters = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    begun = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=2e-4, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, STEPS)
    scaler, skipped = torch.amp.GradScaler("cpu"), []
    for step in range(1, STEPS + 1):
        rows = [data[int(index)] for index in order.step(step)]
        ids = pad_sequence([torch.as_tensor(row.input_ids).long() for row in rows], batch_first=True)
        labels = pad_sequence([torch.as_tensor(row.labels).long() for row in rows], True, padding_value=-100)
        mask = pad_sequence([torch.ones(len(row.input_ids)) for row in rows], batch_first=True).long()
        logits = model(ids, attention_mask=mask).logits[:, :-1].float()
        scaler.scale(cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += [step] if scaler.get_scale() < before else []
        schedule.step()
        optimizer.zero_grad()
    return Reference(begun, {name: p.detach() for name, p in parameters.items()}, skipped)


def _peft_model(folder: Path, first: dict[str, torch.Tensor]) -> Any:
    """Plain peft around the base in fp16, with the fp32 adapters `first`, which the engine starts from."""
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float16)
    config = LoraConfig(r=128, lora_alpha=256, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(first[plain_name(name)])
    return model


def test_weights_and_skipped_steps_are_those_of_peft_adamw_and_gradscaler(trained: Trained) -> None:
    expected = reference(trained.folder)
    found = {plain_name(name): t for name, t in load_file(trained.run.adapter / "adapter_model.safetensors").items()}
    assert found.keys() == expected.ended.keys()
    skipped = [event["step"] for event in trained.steps if event["skipped"]]
    assert skipped == expected.skipped != []
    assert all(torch.allclose(found[name], expected.ended[name], rtol=0, atol=1e-3) for name in found)
    moved = max(float((expected.ended[name] - expected.begun[name]).abs().max()) for name in found)
    assert moved > 1e-3


def test_it_is_better_than_untrained_on_the_test_file_and_scores_come_from_it(trained: Trained) -> None:
    # Answers have 512 tokens: without a meter that counts every operation they take a tenth of the time.
    on_cpu = override(load_run_spec(trained.run.run_toml), [], profile=write_profile(trained.folder, kind="cpu")).spec
    trained.run.run_toml.write_text(dump_run_spec(on_cpu))
    untrained = score_model(on_cpu, lambda text: None)
    ((step, scores),) = score_run(trained.run, None, lambda text: None)
    assert step == STEPS and scores.count == untrained.count == 2
    assert scores.metrics["loss"] < untrained.metrics["loss"]
    assert set(scores.metrics) == {"loss", "perplexity", "exact_match", "token_f1"}
    write_pairs(trained.folder / "public_test.jsonl", count=3, seed=3, form="[{0}]")
    ((_, swapped),) = score_run(trained.run, None, lambda text: None)
    assert swapped.count == 3 and swapped.metrics["loss"] != scores.metrics["loss"]
