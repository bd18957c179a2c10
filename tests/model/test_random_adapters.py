"""Adapters drawn at random are continued, saved, reopened in plain peft, merged, and reopened in plain transformers:
the logits are equal to 1e-5, or there is an error before training."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftConfig
from transformers import AutoModelForCausalLM

from engine.errors import TunedeckError, UsageError
from engine.extras.handover.merge import merge
from engine.model.loss import make_loss
from engine.model.verify import require_mergeable
from tests.model.samples import VOCABULARY, batch_of, cpu, disturb, load, logits_of, run_spec, write_model
from tests.model.saved_adapters import foreign, lora, opened_by_peft

FEW, MANY = 3, 30
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2", "mixtral", "phi3")
NARROW = {"gpt2": (["c_attn"], ["c_attn", "c_fc"]), "phi3": (["qkv_proj"], ["o_proj", "down_proj"])}
TARGETS: tuple[Any, ...] = (
    ["q_proj"], ["q_proj", "v_proj"], "all-linear", r".*layers\.1\..*_proj", ["q_proj", "lm_head"],
    ["v_proj", "embed_tokens"],
)  # fmt: skip
TOKENS = [f"<new-{number}>" for number in range(8)]
OTHER_TYPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("IA3Config", {"feedforward_modules": []}), ("LoHaConfig", {"r": 2}), ("LoKrConfig", {"r": 2}),
    ("VeraConfig", {"r": 4}), ("HRAConfig", {"r": 2}), ("OFTConfig", {"r": 0, "oft_block_size": 8}),
    ("AdaLoraConfig", {"total_step": 10}),
    ("PromptTuningConfig", {"num_virtual_tokens": 2}),
)  # fmt: skip


def drawn(dice: random.Random, family: str) -> tuple[PeftConfig, dict[str, Any]]:
    """(config, keywords of `foreign`) of a random adapter for a model of `family`."""
    targets = dice.choice(NARROW.get(family, TARGETS))
    if isinstance(targets, list) and dice.random() < 0.25 and family not in NARROW:
        name, more = dice.choice(OTHER_TYPES)
        modules = {} if name == "PromptTuningConfig" else {"target_modules": ["q_proj", "v_proj"]}
        config: PeftConfig = getattr(peft, name)(task_type="CAUSAL_LM", **modules, **more)
        return config, {}
    keys: dict[str, Any] = {
        "target_modules": targets,
        "r": dice.choice([1, 2, 4, 8]),
        "lora_alpha": dice.choice([1, 8, 16]),
    }
    keys |= {"use_rslora": dice.random() < 0.3, "lora_dropout": dice.choice([0.0, 0.0, 0.1])}
    keys |= {"init_lora_weights": dice.choice([True, True, "gaussian", "pissa", "olora", "orthogonal"])}
    whole = {"gpt2": ["ln_f"]}.get(family, dice.choice([["norm"], ["lm_head"], ["embed_tokens", "lm_head"]]))
    if dice.random() < 0.4 and not (isinstance(targets, list) and set(whole) & set(targets)):
        keys["modules_to_save"] = whole
    if dice.random() < 0.3 and isinstance(targets, list):
        keys["rank_pattern"], keys["alpha_pattern"] = {targets[0]: 3}, {targets[0]: 5}
    if dice.random() < 0.2:
        keys["use_dora"], keys["init_lora_weights"] = True, True
    if dice.random() < 0.3:
        keys["ensure_weight_tying"] = True
    options: dict[str, Any] = {"dtype": torch.bfloat16} if dice.random() < 0.3 else {}
    if dice.random() < 0.25:
        options["rows"] = VOCABULARY + len(TOKENS)
    return lora(**keys), options


def continued(folder: Path, seed: int) -> str:
    """Continue a random adapter in `folder` and open what comes of it; returns "equal", the error before training, or
    what peft says of an adapter that it cannot make itself."""
    dice = random.Random(seed)
    family = dice.choice(FAMILIES)
    tied = {} if family in NARROW else {"tie_word_embeddings": dice.random() < 0.5}
    base = write_model(folder / "base", family, **tied)
    if dice.random() < 0.3:
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        (base / "model.safetensors").unlink()
        whole.save_pretrained(base, max_shard_size="40KB")
    config, options = drawn(dice, family)
    try:
        adapter = foreign(base, folder / "adapter", config, **options)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"peft: {error}"
    grown = options.get("rows")
    added: dict[str, Any] = {"add_tokens": TOKENS} if grown is not None and dice.random() < 0.7 else {}
    spec, batch = run_spec(str(base), adapter=str(adapter), **added), batch_of()
    try:
        loaded = load(spec)
        require_mergeable(loaded)
    except TunedeckError as error:
        assert isinstance(error, UsageError) and error.fix
        return f"error: {error.found}"
    theirs: Any = opened_by_peft(base, adapter, grown)
    theirs.base_model.set_attn_implementation(loaded.attention)
    torch.testing.assert_close(logits_of(loaded.model, batch), logits_of(theirs, batch), rtol=1e-5, atol=1e-5)
    loaded.model.eval()  # dropout is drawn by steps alone
    make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=5, device=cpu())(batch).backward()
    assert any(each.grad is not None and bool(each.grad.any()) for _, each in loaded.trainable())
    disturb(loaded)
    loaded.save(folder / "result")
    expected = logits_of(loaded.model, batch)
    again: Any = opened_by_peft(base, folder / "result", grown)
    again.base_model.set_attn_implementation(loaded.attention)
    torch.testing.assert_close(logits_of(again, batch), expected, rtol=1e-5, atol=1e-5)
    resumed = load(spec)
    resumed.load_weights(folder / "result")
    assert torch.equal(logits_of(resumed.model, batch), expected)
    merge(folder / "result", folder / "merged", lambda text: None)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    merged.set_attn_implementation(loaded.attention)
    torch.testing.assert_close(logits_of(merged, batch), expected, rtol=1e-5, atol=1e-5)
    return "equal"


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.torture)])
def test_random_adapters_give_equal_logits_everywhere_or_an_error_before_training(tmp_path: Path, count: int) -> None:
    outcomes: list[str] = []
    for seed in range(10 * count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = continued(tmp_path / str(seed), seed)
        outcomes += [] if outcome.startswith("peft: ") else [outcome]
        if len(outcomes) == count:
            break
    print(*outcomes, sep="\n")  # noqa: T201  (shown by -s)
    assert outcomes.count("equal") >= count / 3
