"""What a saved result says about itself to other tools: the tokens that end an answer, and the base of an adapter."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine.data.chat_template import end_of_turn, special_ids
from engine.model.reference import ADAPTER_CONFIG

GENERATION_CONFIG = "generation_config.json"


def end_token_ids(defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end an answer: those of the model's generation config `defaults` that are special tokens
    of this tokenizer (which may not be the model's own), the tokenizer's end of sequence, and the chat template's end
    of turn. The model's come first, in their order."""
    named = getattr(defaults, "eos_token_id", None)
    of_model = named if isinstance(named, list) else [named]
    special = special_ids(tokenizer)
    found = [*(token for token in of_model if token in special), tokenizer.eos_token_id, end_of_turn(tokenizer)]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def save_generation_config(folder: Path, defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model's generation config with every token that ends an answer: a base that was trained on a chat
    template ends its turns with a token that its own config does not list, and servers would generate past it."""
    config = copy.deepcopy(defaults) if defaults is not None else GenerationConfig()
    ends = end_token_ids(defaults, tokenizer)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    if config.pad_token_id is None and tokenizer.pad_token_id is not None:
        config.pad_token_id = int(tokenizer.pad_token_id)
    # Not save_pretrained, which refuses sampling settings that published models have.
    config.to_json_file(folder / GENERATION_CONFIG)


def name_base(adapter: Path, base: str | None) -> None:
    """Name the base of a saved adapter by its hub id, or not at all: peft also writes folders of this machine, into the
    adapter's config and into a model card, which is removed."""
    (adapter / "README.md").unlink(missing_ok=True)
    path = adapter / ADAPTER_CONFIG
    config = json.loads(path.read_text("utf-8"))
    config["base_model_name_or_path"] = base if base and is_hub_id(base) else None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def is_hub_id(name: str) -> bool:
    """Whether `name` can be a hub id: no path, and no folder on this machine."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1 and not Path(name).exists()
