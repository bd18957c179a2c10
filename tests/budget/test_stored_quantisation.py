"""The files of a model show that its weights are quantised, in every layout of the quantisers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.architecture.model_folder import quantisation_of

STEM = "model.layers.0.mlp.up_proj."
INT32, BYTES, HALF = (
    torch.zeros(8, 8, dtype=torch.int32),
    torch.zeros(8, 8, dtype=torch.uint8),
    torch.zeros(8, 8).half(),
)
FP8, INT8 = torch.zeros(8, 8, dtype=torch.float8_e4m3fn), torch.zeros(8, 8, dtype=torch.int8)

LAYOUTS: dict[str, dict[str, Tensor]] = {
    "gptq": {"qweight": INT32, "scales": HALF, "qzeros": INT32, "g_idx": torch.zeros(8, dtype=torch.int32)},
    "mlx": {"weight": torch.zeros(8, 8, dtype=torch.uint32), "scales": HALF, "biases": HALF},
    "fp8 of blocks": {"weight": FP8, "weight_scale_inv": HALF},
    "fp8 of tensors": {"weight": FP8, "weight_scale": torch.ones(()), "input_scale": torch.ones(())},
    "scales beside 16-bit weights": {"weight": HALF, "weight_scale_inv": HALF},
    "mxfp4": {"gate_up_proj_blocks": BYTES, "gate_up_proj_scales": BYTES},
    "compressed-tensors": {"weight_packed": INT32, "weight_scale": HALF, "weight_shape": torch.tensor([8, 64])},
    "bitsandbytes, 8 bits": {"weight": INT8, "SCB": torch.zeros(8)},
    "bitsandbytes, 4 bits": {"weight": BYTES, "weight.absmax": torch.zeros(8, 2).byte()},
    "hqq": {"W_q": BYTES, "scale": HALF, "zero": HALF},
    "eetq": {"weight": INT8, "weight_scales": HALF},
    "quanto": {"weight._data": INT8, "weight._scale": HALF},
    "aqlm": {"codes": torch.zeros(8, 8, 1, dtype=torch.int16), "codebooks": HALF, "scales": HALF},
    "vptq": {"indices": INT32, "centroids.weight": HALF},
    "spqr": {"dense_weights": torch.zeros(8, 8, dtype=torch.int64), "in_perm": INT32},
    "torchao": {"weight:qdata": INT8, "weight:scale": HALF},
    "fp-quant": {"qweight": BYTES, "scales": BYTES},
    "bitnet": {"weight": BYTES, "weight_scale": torch.ones(1)},
    "higgs": {"weight": torch.zeros(8, 8, dtype=torch.int16), "scales": HALF, "tables": HALF},
}  # fmt: skip


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_headers_show_quantised_weights(layout: str, tmp_path: Path) -> None:
    write(tmp_path, {STEM + name: tensor for name, tensor in LAYOUTS[layout].items()})
    found = quantisation_of({}, tmp_path)
    assert found is not None and STEM in found


def test_a_plain_model_shows_none(tmp_path: Path) -> None:
    plain = {
        "model.up_proj.weight": HALF, "model.embeddings.position_ids": torch.arange(8)[None],
        "logit_scale": torch.ones(()),
        "vision.layer_scale": torch.ones(8), "h.0.attn.bias": torch.ones(1, 1, 8, 8).byte(), "attn.masked_bias": HALF,
    }  # fmt: skip
    assert quantisation_of({"vision_config": {}, "quantization_config": None}, write(tmp_path, plain)) is None


@pytest.mark.parametrize(
    ("file", "table", "told"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt, FP8"),
        ("quantize_config.json", {"bits": 4}, "gptq"),
        ("quant_config.json", {"w_bit": 4}, "awq"),
    ],
)
def test_own_files_of_quantisers_name_the_method(file: str, table: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps(table))
    assert quantisation_of({}, tmp_path) == told


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX, 4 bits"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq in text_config"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bnb-8bit"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bnb-4bit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)  # fmt: skip
def test_configs_name_the_method(config: dict[str, Any], told: str) -> None:
    assert quantisation_of(config, None) == told
