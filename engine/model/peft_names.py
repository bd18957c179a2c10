"""What peft makes of the names of linear layers: it takes some for those of fused experts, and renames some when it
opens an adapter, as transformers renames the weights of an older checkpoint. peft itself is asked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from transformers import PreTrainedModel

PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"
"""Around a layer's name in an adapter file."""


def names_of_experts(model: PreTrainedModel, linears: Iterable[str]) -> set[str]:
    """The last parts of those of `linears` that peft turns into targets on fused experts, wherever they stand."""
    return {last for last in {name.rpartition(".")[2] for name in linears} if _is_experts(model, last)}


def _is_experts(model: PreTrainedModel, last: str) -> bool:
    config = LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it wants the gate and the up projection together
        return True
    return last not in (config.target_modules or ())


def not_found_again(model: PreTrainedModel, linears: Iterable[str]) -> set[str]:
    """Those of `linears` whose adapter peft would not find again in the file that it saves."""
    saved = {f"{PREFIX}{name}{SUFFIX}": torch.empty(1, 1, device="meta") for name in linears}
    found = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), dict(saved))
    return {name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in saved.keys() - found.keys()}
