"""Code that benchmarks share: writes a small model and texts of given lengths, and makes the run spec to train on them.

Try: python -m benchmarks.loop
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Trainer

from engine.config.schema.recipe import Model
from engine.config.schema.run import RunSpec
from engine.model.tokenizer import load_tokenizer

RECIPE_MODEL = Model(id="builtin:tiny", tokenizer="builtin:bytes", init="random")
BATCH, MICRO = 32, 8
RATE = 1e-3


@dataclass
class Job:
    """A training job of a benchmark: a model folder, token sequences, and the number of steps."""

    folder: Path
    sequences: list[list[int]]
    steps: int

    @property
    def tokens_per_step(self) -> list[int]:
        """The number of tokens in each step, without padding."""
        lengths = [len(sequence) for sequence in self.sequences]
        return [sum(lengths[start : start + BATCH]) for start in range(0, self.steps * BATCH, BATCH)]


def write_job(folder: Path, lengths: list[int], *, vocabulary: int, hidden: int, steps: int, layers: int = 4) -> Job:
    """Write a random Qwen2 of `layers` layers, with this vocabulary and hidden size, and texts of `lengths` tokens into
    `folder`; returns the job of `steps` steps.

    With `hidden` = 192 and 4 layers the model has about 2 M parameters without its embedding.
    """
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(RECIPE_MODEL)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drawn = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    texts = ["".join(drawn.choices(letters, k=length - 1)) for length in lengths]
    with (folder / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return Job(folder, [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts], steps)


def spec_of(job: Job, device: str) -> RunSpec:
    """Return the run spec with which the engine trains the job on a device of the kind `device`."""
    recipe = {
        "name": "bench",
        "model": {"id": str(job.folder), "dtype": "float32", "tokenizer": str(job.folder)},
        "method": {"kind": "full"},
        "data": {
            "sources": [{"name": "main", "path": str(job.folder / "samples.jsonl")}],
            "shuffle": False,
            "max_length": 513,
        },
        "train": {
            "max_steps": job.steps,
            "batch_size": BATCH,
            "micro_batch": MICRO,
            "learning_rate": RATE,
            "scheduler": "constant",
            "gradient_checkpointing": False,
        },
    }
    profile = {"name": "bench", "device": {"kind": device, "memory_gib": 64.0}}
    return RunSpec.model_validate({"name": "bench", "profile": profile, "recipe": recipe})


def quietly(trainer: Trainer) -> None:
    """Remove from a transformers Trainer the callback that prints a line at each step, then train with it."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate rows as DataCollatorWithPadding does, and pad the rows' labels with -100, too. Returns tensors [B, S] by
    name."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = (torch.full((len(rows), width), filler) for filler in (0, -100, 0))
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[number, :length] = torch.tensor(row["input_ids"])
        labels[number, :length] = torch.tensor(row["labels"])
        mask[number, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
