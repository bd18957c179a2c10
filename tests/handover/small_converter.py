"""A converter to GGUF that imports nothing large: the tables of a tiny model and its tensors' shapes, without weights.

As a program: `small_converter.py MODEL --outfile FILE --outtype TYPE`.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> bytes:
    """A value after the number of its type, as the format has it."""
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf(metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A header without weights."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    parts += [text(name) + typed(value) for name, value in metadata.items()]
    for name, shape in tensors.items():
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 1, 0))
    return b"".join(parts)


def convert(model: Path, target: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    told = json.loads((model / "tokenizer_config.json").read_text())
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    tokens |= {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    end = next(number for number, token in tokens.items() if token == told["eos_token"])
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    kind = config["model_type"]
    metadata = {"general.architecture": kind, f"{kind}.block_count": config["num_hidden_layers"],
                f"{kind}.rope.freq_base": float(theta), "tokenizer.ggml.tokens": [tokens[at] for at in sorted(tokens)],
                "tokenizer.ggml.eos_token_id": end}  # fmt: skip
    template = model / "chat_template.jinja"
    if template.exists():
        metadata["tokenizer.chat_template"] = template.read_text()
    with (model / "model.safetensors").open("rb") as weights:
        header = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
    shapes = {
        name.replace("model.layers.", "blk."): tuple(each["shape"])
        for name, each in header.items()
        if name != "__metadata__"
    }
    target.write_bytes(gguf(metadata, shapes))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1]))
    except OSError as error:
        sys.exit(f"{error}")
