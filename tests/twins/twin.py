"""A twin: a shipped recipe with a list of `--set`, on a tiny model of the same architecture. Not a test module.

The lists are in `sets/`, one `KEY=VALUE` a line; MODEL and DATA stand for folders. `test_lists.py` says which keys they
may have, so that a twin cannot drift from what ships.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.model.tokenizer import byte_tokenizer

SETS = Path(__file__).parent / "sets"

PROFILE = """schema = 1
kind = "profile"
title = "A metered device of the twins"
[device]
kind = "{kind}"
count = {count}
memory_gib = {memory_gib}
[parallel]
strategy = "{strategy}"
"""

TINY: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048},
}
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 256,
}  # fmt: skip


def listed(recipe: str) -> list[str]:
    """The lines of a twin's list."""
    return (SETS / f"{recipe}.txt").read_text().split()


def twin_sets(recipe: str, model: Path, data: Path) -> list[str]:
    """The lines of a twin's list, with `model` and `data` in place of MODEL and DATA."""
    return [line.replace("MODEL", str(model)).replace("DATA", str(data)) for line in listed(recipe)]


def write_profile(folder: Path, *, memory_gib: float = 1.0, kind: str = "metered", count: int = 1) -> str:
    """Write a profile with `count` devices of this kind, each with this memory; returns its path."""
    path = folder / f"twin-{kind}-{count}.toml"
    strategy = "replicated" if count > 1 else "single"
    path.write_text(PROFILE.format(kind=kind, memory_gib=memory_gib, count=count, strategy=strategy))
    return str(path)


def twin(
    recipe: str, folder: Path, *more: str, memory_gib: float = 1.0, kind: str = "metered", count: int = 1
) -> RunSpec:
    """The run spec of a twin whose model is in `folder/model` and whose data are in `folder`, with further `--set`."""
    profile = write_profile(folder, memory_gib=memory_gib, kind=kind, count=count)
    return resolve(profile, recipe, [*twin_sets(recipe, folder / "model", folder), *more]).spec


def write_model(folder: Path, family: str, dtype: torch.dtype, *, layers: int = 2, embedding_std: float = 0.5) -> Path:
    """Write a tiny model with random weights and the byte tokenizer; returns `folder`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **TINY[family], "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # Norms are small, so that steps of 1e-5 do not vanish in bf16.
        torch.nn.init.normal_(parameter, std=embedding_std if "embed" in name else 0.05 if "norm" in name else 0.3)
    model.to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_pairs(path: Path, *, count: int, seed: int, form: str) -> Path:
    """Write `count` samples, each with a few random letters as the prompt, and `form.format(prompt)` as the completion;
    returns `path`."""
    drawn = random.Random(seed)
    # A few are long, so that a micro-batch with the bytes of one of these holds several of the others.
    words = [
        "".join(drawn.choices("abcdefgh", k=drawn.randint(3, 5) if number % 12 else 24)) for number in range(count)
    ]
    rows = [{"prompt": f"{word} ", "completion": form.format(word)} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
