"""Preference learning in memory: the plan at its edge, and the smallest device beside TRL's.

Run: python -m benchmarks.preferences plan [--cases 20]     (CPU, about eight minutes)
     python -m benchmarks.preferences trl                   (CPU, about two minutes; needs trl)

`plan` trains small random models on pairs, with 1 % more memory than predicted and with 1 % less (as
`benchmarks.capacity_runs` does on texts). `trl` takes two steps of DPO with TRL's DPOTrainer as it comes (both sides of
one pair at once; in full fine-tuning a second model as the reference; gradient checkpointing on) and with ours, on the
same model, rows and metered device, and prints both peaks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.capacity_runs import show_cases
from engine.config.schema.run import RunSpec
from engine.data.prepare import prepare_data
from engine.device.metered import MeteredDevice
from engine.model.config import disable_progress_bars
from engine.model.tokenizer import load_tokenizer
from tests.budget.capacity_runs import SEED, pairs, preference_cases
from tests.train.run_helpers import make_spec, new_run, of_kind, train

VOCABULARY, LENGTH, STEPS = 32_000, 512, 2
LORA = {"kind": "lora", "rank": 8, "alpha": 16, "targets": "all-linear", "objective": "dpo"}
FULL = {"kind": "full", "objective": "dpo"}


def write_base(folder: Path) -> Path:
    """A model of random weights with a vocabulary of usual size; its tokens are bytes."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def spec_of(folder: Path, base: Path, method: dict[str, Any], capacity_bytes: float) -> RunSpec:
    rows = {"name": "main", "path": str(pairs(folder, 8, LENGTH)), "template": "none"}
    return make_spec(
        folder / "pairs.jsonl",
        memory_gib=capacity_bytes / 2**30,
        model={"id": str(base), "tokenizer": "builtin:bytes", "init": "pretrained"},
        method=method,
        data={"sources": [rows], "max_length": LENGTH},
        train={"max_steps": STEPS, "batch_size": 1, "micro_batch": 1, "gradient_checkpointing": True},
    )


def ours(folder: Path, base: Path, method: dict[str, Any]) -> int:
    """The size in bytes of the smallest metered device on which the run ends without an out-of-memory error."""
    _, events = train(new_run(folder / "roomy", spec_of(folder, base, method, 2.0**33)))
    peak_bytes = max(event["peak_bytes"] for event in of_kind(events, "step"))
    code, events = train(new_run(folder / "exact", spec_of(folder, base, method, peak_bytes)))
    if code or of_kind(events, "backoff"):
        raise RuntimeError(f"a device of the measured peak, {peak_bytes} bytes, is too small")
    return int(peak_bytes)


def theirs(folder: Path, base: Path, method: dict[str, Any]) -> int:
    """The peak in bytes of the same steps by TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    spec = spec_of(folder, base, method, 2.0**33)
    tokenizer = load_tokenizer(spec.recipe.model)
    sequences = list(prepare_data(spec, tokenizer).train)
    table = []
    for chosen, rejected in zip(sequences[0::2], sequences[1::2], strict=True):
        prompt = int((chosen.labels == -100).sum())
        sides = {"chosen_ids": chosen.input_ids[prompt:].tolist(), "rejected_ids": rejected.input_ids[prompt:].tolist()}
        table.append({"prompt_ids": chosen.input_ids[:prompt].tolist(), **sides})

    class AsTheyAre(DPOTrainer):
        """TRL's trainer on rows that are tokenised already."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    device = MeteredDevice(2**33)
    with device.activate():
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapter, reference = None, None
        if method is LORA:
            adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        else:
            reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        arguments = DPOConfig(
            output_dir=str(folder / "theirs"), max_steps=STEPS, per_device_train_batch_size=1, use_cpu=True, bf16=False,
            save_strategy="no", report_to=[], disable_tqdm=True, max_length=None,
        )  # fmt: skip
        trainer = AsTheyAre(
            model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(table),
            processing_class=tokenizer, peft_config=adapter,
        )  # fmt: skip
        device.reset_peak()
        trainer.train()
        return device.memory().peak_bytes


def beside_trl() -> int:
    for name, method in (("full fine-tuning", FULL), ("LoRA", LORA)):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            base = write_base(place / "base")
            found = ours(place, base, method), theirs(place, base, method)
        mine, other = (size / 2**20 for size in found)
        print(f"{name}: TRL {other:.0f} MiB, ours {mine:.0f} MiB, {other / mine:.2f} times as much", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "trl"))
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    return (
        beside_trl()
        if asked.what == "trl"
        else show_cases(
            [*preference_cases(asked.cases, asked.seed), *preference_cases(asked.cases // 2, asked.seed, ("kto",))]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
