"""What a model does between its decoder, its head and its logits is asked of the model itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from benchmarks.type_configs import tiny_config
from engine.errors import UsageError
from engine.model.config import auto_class, layer_configs
from engine.model.head import find_head
from engine.model.trained import decoder_of

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
ASKED = {
    "llama": (1.0, None),
    "cohere": (0.25, None),
    "granite": (0.125, None),
    "gemma2": (1.0, 7.0),
    "minicpm3": (2.0, None),
    "recurrent_gemma": (1.0, 5.0),
}
KEYS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 7.0},
    "minicpm3": {"dim_model_base": 64},
    "recurrent_gemma": {"logits_soft_cap": 5.0, "lru_width": 32, "block_types": ["attention"]},
}


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**SMALL, **KEYS.get(family, {}))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize("family", ASKED)
def test_scale_and_cap_are_those_of_the_models_own_logits(family: str) -> None:
    model, ids_BS = model_of(family), torch.arange(4)[None]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(200)  # a cap shows on large logits alone
        head = find_head(model)
        own_BSV = model(input_ids=ids_BS, use_cache=False).logits
        ours_BSV = head.logits(decoder_of(model)(input_ids=ids_BS, use_cache=False).last_hidden_state)
    torch.testing.assert_close(ours_BSV, own_BSV, rtol=1e-5, atol=1e-5)
    assert (head.scale, head.softcap) == pytest.approx(ASKED[family])
    assert own_BSV.abs().max() > 1


def test_a_model_without_values_is_asked_too() -> None:
    with torch.device("meta"):
        shown = model_of("cohere")
    with FakeTensorMode():
        fake = model_of("gemma2")
        assert find_head(fake).softcap == 7.0
    assert find_head(shown).scale == 0.25


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    before = {name: id(module) for name, module in model.named_modules()}
    find_head(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("chameleon", "changes its logits after the head"),
        ("modernbert-decoder", "computes its logits from other states than those of its decoder"),
    ],
)
def test_logits_that_are_not_those_of_one_head_are_refused(model_type: str, said: str) -> None:
    config = tiny_config(model_type)
    config.get_text_config().vocab_size = 400
    model = auto_class(config).from_config(config)
    with pytest.raises(UsageError, match=said):
        find_head(model)


def test_a_config_that_knows_nothing_of_layers_that_differ_is_that_of_all_layers() -> None:
    """Older versions of transformers have no such key."""
    config: Any = SimpleNamespace(hidden_size=8)
    assert layer_configs(config) == [config]
