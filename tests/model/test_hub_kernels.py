"""A model config cannot make transformers download a kernel of the hub and run it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from engine.errors import UsageError
from engine.model.config import auto_class


def llama(key: str, attention: str) -> PreTrainedConfig:
    options: dict[str, Any] = {key: attention}
    return LlamaConfig(**options)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_that_names_a_kernel_is_not_opened(key: str) -> None:
    for config in (
        llama(key, "owner/kernel"), llama(key, "paged|owner/kernel@v1:forward"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="is code from the hub"):
            auto_class(config)
    outer = PreTrainedConfig()
    vars(outer)["text_config"] = llama(key, "owner/kernel")
    with pytest.raises(UsageError, match="is code from the hub"):
        auto_class(outer)
    assert auto_class(llama(key, "sdpa")).__name__ == "AutoModelForCausalLM"
