"""Model folders for `benchmarks.gpu`: published configs with random weights, so that nothing comes from the hub.

The configs are those that ship in `profiles/models`, each with its source. Memory and speed do not depend on the
weights' values.

Try: `python -c "from benchmarks.gpu_models import *; print(write_model(Path('/tmp/m'), 'Qwen/Qwen3-4B'))"`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.architecture.lookup import find_config

if TYPE_CHECKING:  # torch is imported where weights are written: most measurements leave it to their engines
    import torch

SMALL_CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 1200, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
"""The config that replaces every model on the metered device."""
SHARD_BYTES = 2 * 2**30
"""Most bytes of one file of random weights, which are made in host memory."""
STANDARD_DEVIATION = 0.02
"""Standard deviation of random matrices: `initializer_range` in the published configs of these families."""


def write_model(folder: Path, model: str | None, *, layers: int | None = None, weights: str | None = None) -> str:
    """Write the published config of `model`, or SMALL_CONFIG if that is None, into `folder`; returns its path.

    With `layers`, the model has only so many decoder layers, of the published size. With `weights`, also write random
    weights of this dtype, for runs that must read weights from files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SMALL_CONFIG if model is None else find_config(model)
    if layers is not None:
        config = {**config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if weights is not None and not (folder / "model.safetensors.index.json").exists():
        _write_random_weights(folder, weights)
    return str(folder)


def _write_random_weights(folder: Path, dtype: str) -> None:
    """Write random weights of the dtype (such as "bfloat16") for the config in `folder`: a file for every SHARD_BYTES,
    then the index of all files, without which the folder counts as incomplete. Norms are ones, so that activations
    neither vanish nor overflow."""
    import torch
    from transformers import AutoConfig

    from engine.model.config import auto_class

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    tied = model.all_tied_weights_keys or {}
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in [(name, each.shape) for name, each in model.state_dict().items() if name not in tied]:
        shard[name] = torch.ones(shape, dtype=getattr(torch, dtype))
        if len(shape) > 1:
            shard[name].normal_(0.0, STANDARD_DEVIATION)
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            _write_shard(folder, shard, places)
    _write_shard(folder, shard, places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")


def _write_shard(folder: Path, shard: dict[str, torch.Tensor], places: dict[str, str]) -> None:
    """Write the tensors of `shard` to a new safetensors file in `folder`, map their names to the file's name in
    `places`, and empty `shard`."""
    from safetensors.torch import save_file

    if shard:
        file = f"model-{len(set(places.values())):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()
