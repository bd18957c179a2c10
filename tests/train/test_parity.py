"""The engine trains what Hugging Face's Trainer trains: same model, data and order give the same losses and weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.device.open import open_device
from engine.model.load import load_model
from engine.model.loaded import plain_name
from engine.model.tokenizer import load_tokenizer
from tests.present import present
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

STEPS, BATCH, MICRO = 8, 8, 2
RECIPE_TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "batch_size": BATCH,
    "micro_batch": MICRO,
    "learning_rate": 3e-3,
    "scheduler": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of random weights and the byte tokenizer, and data in a fixed order."""
    folder = tmp_path_factory.mktemp("parity")
    spec = make_spec(write_samples(folder / "samples.jsonl", count=LONG * BATCH, seed=5))
    tokenizer = load_tokenizer(spec.recipe.model)
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder


def spec_for(start: Path, method: dict[str, Any], dtype: str = "float32", steps: int = STEPS) -> RunSpec:
    return make_spec(
        start / "samples.jsonl",
        device="cpu",
        model={"id": str(start / "base"), "tokenizer": str(start / "base"), "init": "pretrained", "dtype": dtype},
        method=method,
        train={**RECIPE_TRAIN, "max_steps": steps},
        data={"shuffle": False},
        checkpoint={"every_minutes": 0},
    )


class Losses(TrainerCallback):
    """Collects the loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}
        self.grad_norms: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.by_step[state.global_step] = logs["loss"]
            self.grad_norms[state.global_step] = logs["grad_norm"]


def with_their_trainer(spec: RunSpec, model: Any, folder: Path, **changes: Any) -> tuple[Losses, Any]:
    """Train `model` with transformers' Trainer on the same samples in the same order. Returns losses and gradient norms
    by step, and the trained model."""
    tokenizer = load_tokenizer(spec.recipe.model)
    data = prepare_data(spec, tokenizer).train
    rows = [{"input_ids": example.input_ids.tolist(), "labels": example.labels.tolist()} for example in data]

    def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in batch)

        def column(key: str, filler: int) -> torch.Tensor:
            return torch.tensor([row[key] + [filler] * (width - len(row[key])) for row in batch])

        ids = column("input_ids", tokenizer.pad_token_id)
        mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in batch])
        return {"input_ids": ids, "labels": column("labels", -100), "attention_mask": mask}

    seen = Losses()
    arguments = TrainingArguments(
        **changes,
        output_dir=str(folder),
        max_steps=present(spec.recipe.train.max_steps),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO,
        learning_rate=RECIPE_TRAIN["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=pad, callbacks=[seen]).train()
    return seen, model


def assert_same_losses(ours: dict[int, float], theirs: dict[int, float]) -> None:
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    assert [ours[step] for step in ours] == pytest.approx([theirs[step] for step in ours], rel=1e-4)


def named(name: str, text: str) -> str:
    return f"{name}: {text}"


def test_full_fine_tuning_equals_trainer(start: Path, tmp_path: Path) -> None:
    spec = spec_for(start, {"kind": "full"})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(start / "base", dtype=torch.float32)
    theirs, model = with_their_trainer(spec, model, tmp_path / "theirs")
    assert_same_losses(losses(events), theirs.by_step)
    trained = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
    for (name, mine), (_, other) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=partial(named, name))


def test_lora_equals_trainer(start: Path, tmp_path: Path) -> None:
    spec = spec_for(start, {"kind": "lora", "rank": 4, "alpha": 8.0})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0
    model: Any = lora_of_peft(start, spec, tmp_path, torch.float32)
    theirs, model = with_their_trainer(spec, model, tmp_path / "theirs")
    assert_same_losses(losses(events), theirs.by_step)
    mine = load_file(place.adapter / "adapter_model.safetensors")
    other = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(mine) == len(other) > 0
    for name, tensor in mine.items():
        match = other[name.replace(".weight", ".default.weight")]
        torch.testing.assert_close(tensor, match.detach(), rtol=1e-4, atol=1e-5)


def load_first_adapter(model: Any, spec: RunSpec, tmp_path: Path) -> None:
    """Give `model` the adapter weights that the engine starts from."""
    loaded = load_model(spec, open_device(spec), load_tokenizer(spec.recipe.model))
    fresh = {name: parameter.detach().clone() for name, parameter in loaded.trainable()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(fresh[plain_name(name)])


def lora_of_peft(start: Path, spec: RunSpec, tmp_path: Path, dtype: torch.dtype) -> PeftModel:
    """A plain peft model: the base in `dtype`, and fp32 adapters with the values from which the engine starts."""
    base = AutoModelForCausalLM.from_pretrained(start / "base", dtype=dtype)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, config)
    load_first_adapter(model, spec, tmp_path)
    return model


LONG, HALF_ULP = 50, 2.0**-9
"""Steps of the runs in bf16, and the largest relative error of rounding to bf16. Measured: losses 4e-5 apart, what the
weights have moved 5e-3."""


def difference(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two sets of tensors, relative to the second."""
    pairs = [(mine[name].float(), other[name].float()) for name in other]
    return float(sum((a - b).norm() ** 2 for a, b in pairs) ** 0.5 / sum(b.norm() ** 2 for _, b in pairs) ** 0.5)


def trained_by_name(model: Any) -> dict[str, torch.Tensor]:
    return {plain_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("autocast", [False, True], ids=["peft, fp32 adapters", "autocast"])
def test_lora_in_bf16_learns_what_trainer_learns(start: Path, tmp_path: Path, autocast: bool) -> None:
    """50 steps. Plain peft multiplies its fp32 adapters in fp32; under autocast it multiplies them in bf16, as the
    engine does."""
    spec = spec_for(start, {"kind": "lora", "rank": 4, "alpha": 8.0}, "bfloat16", LONG)
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    assert code == 0
    model: Any = lora_of_peft(start, spec, tmp_path, torch.bfloat16)
    begun = {name: tensor.clone() for name, tensor in trained_by_name(model).items()}
    theirs, model = with_their_trainer(spec, model, tmp_path / "theirs", bf16=autocast)
    ours = losses(events)
    norms = {event["step"]: event["grad_norm"] for event in of_kind(events, "step")}
    assert ours.keys() == theirs.by_step.keys() == set(range(1, LONG + 1))
    assert ours == pytest.approx(theirs.by_step, rel=HALF_ULP / 4)
    assert norms == pytest.approx(theirs.grad_norms, rel=4 * HALF_ULP)
    saved = load_file(place.adapter / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    mine = {plain_name(name): tensor for name, tensor in saved.items()}
    other = trained_by_name(model)
    moved = {name: other[name] - begun[name] for name in other}
    assert difference({name: mine[name] - begun[name] for name in other}, moved) < 5 * HALF_ULP


def test_an_undisturbed_run_reports_no_backoff(start: Path, tmp_path: Path) -> None:
    place = new_run(tmp_path / "runs", spec_for(start, {"kind": "full"}))
    _, events = train(place)
    assert of_kind(events, "backoff") == []
    assert {event["micro_batches"] for event in of_kind(events, "step")} <= {2, 3, 4}
