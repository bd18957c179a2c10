"""Tensors that transformers' class does not read: results have them, or the run is rejected; config.json of a result is
the base's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.type_cell import write_tiny
from benchmarks.type_configs import tiny_config
from engine.errors import UsageError
from engine.extras.handover.card import _copied
from engine.extras.handover.merge import merge
from engine.model.config import auto_class
from engine.model.surplus import complete_result, refuse_foreign, sentence_on, unread_tensors
from tests.model.samples import load, name_base, run_spec, write_model

PREDICTION: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (64, 128), "mtp.layers.0.self_attn.q_proj.weight": (64, 64)}


def base_with(folder: Path, kind: str, extra: Mapping[str, tuple[int, ...]], **keys: object) -> dict[str, Tensor]:
    """Write a tiny base with tensors that its class has no place for; returns these."""
    write_tiny(tiny_config(kind), folder)
    file = folder / "model.safetensors"
    added = {name: torch.randn(*shape) for name, shape in extra.items()}
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return added


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_adapter(base: Path, folder: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(str(folder))
    name_base(folder, base)
    for file in base.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("kind", "extra", "keys"),
    [
        ("qwen3", PREDICTION, {"use_cache": True, "mtp_num_hidden_layers": 1, "own_key": [1]}),
        ("glm4_moe_lite", {"model.layers.2.eh_proj.weight": (64, 128)}, {}),
        ("qwen3", {"model.layers.2.mlp.up_proj.weight": (64, 64)}, {"num_nextn_predict_layers": 1}),
        ("granitemoehybrid", PREDICTION, {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
        ("nemotron_h", {"mtp.fc.weight": (64, 128)}, {}),
    ],
)
def test_a_merged_model_has_every_tensor_and_key_of_its_base(
    kind: str, extra: dict[str, tuple[int, ...]], keys: dict[str, object], tmp_path: Path
) -> None:
    added = base_with(tmp_path / "base", kind, extra, **keys)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    unread = unread_tensors(model, tmp_path / "base")
    assert {each.entry.name for each in unread} == set(added) and not any(each.foreign for each in unread)
    said = sentence_on(unread)
    assert said is not None and "speculative decoding" in said
    model.save_pretrained(tmp_path / "result", max_shard_size="100KB")
    complete_result(tmp_path / "result", str(tmp_path / "base"), None, model)
    saved = tensors_of(tmp_path / "result")
    base = tensors_of(tmp_path / "base")
    assert saved.keys() == base.keys()
    assert all(torch.equal(saved[name], base[name]) for name in base)
    config = json.loads((tmp_path / "result" / "config.json").read_text())
    original = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config == original
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_merge_copies_and_tells(tmp_path: Path) -> None:
    added = base_with(tmp_path / "base", "qwen3", PREDICTION)
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    said: list[str] = []
    merge(tmp_path / "adapter", tmp_path / "merged", said.append)
    saved = tensors_of(tmp_path / "merged")
    assert all(torch.equal(saved[name], tensor) for name, tensor in added.items())
    assert any("2 tensors of the base, such as mtp.fc.weight" in each for each in said)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "model.layers.1.other.up.weight"],
)
def test_weights_of_another_model_are_rejected_before_the_run(name: str, tmp_path: Path) -> None:
    base_with(tmp_path / "base", "qwen3", {name: (64, 8)})
    spec = run_spec(str(tmp_path / "base"), method={"kind": "lora"}, dtype="float32")
    with pytest.raises(UsageError, match=f"such as {name}.*belong to another model"):
        load(spec)


def test_what_the_model_computes_is_neither_foreign_nor_copied(tmp_path: Path) -> None:
    base_with(tmp_path / "base", "qwen3", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    unread = unread_tensors(model, tmp_path / "base")
    refuse_foreign(unread, "base")
    assert len(unread) == 1 and sentence_on(unread) is None


def test_a_separate_head_is_not_called_tied(tmp_path: Path) -> None:
    base_with(tmp_path / "base", "qwen3", {}, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "result")
    complete_result(tmp_path / "result", str(tmp_path / "base"), None, model)
    assert AutoConfig.from_pretrained(tmp_path / "result").tie_word_embeddings is False


def test_a_full_result_with_tensors_of_its_base_is_loaded_into_the_model_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_with(tmp_path / "base", "qwen3", PREDICTION)
    spec = run_spec(str(tmp_path / "base"), method={"kind": "full"}, dtype="float32")
    loaded = load(spec)
    loaded.save(tmp_path / "result")
    complete_result(tmp_path / "result", str(tmp_path / "base"), None, loaded.base)
    monkeypatch.delattr(type(loaded), "_load_converted")
    again = load(spec)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    again.load_weights(tmp_path / "result")
    pairs = zip(loaded.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert set(again.accounts[-1].unread) == set(PREDICTION)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_scaled_positions_are_written_where_the_base_has_its_own(tmp_path: Path, kind: str) -> None:
    """A base written by transformers 4, without a rotary table, and without the default for theta."""
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3_text" else {}
    base = write_model(tmp_path / "base", kind, **layers)
    file = base / "config.json"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps({**old, "torch_dtype": "float32"}))
    scaling = {"type": "linear", "factor": 4.0}
    spec = run_spec(str(base), method={"kind": "full"}, dtype="float32", rope_scaling=scaling)
    loaded = load(spec)
    loaded.save(tmp_path / "result")
    complete_result(tmp_path / "result", str(base), None, loaded.base)
    written = json.loads((tmp_path / "result" / "config.json").read_text())
    again = AutoConfig.from_pretrained(tmp_path / "result")
    assert again.rope_parameters == loaded.base.config.rope_parameters
    if kind == "llama":
        assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and "rope_theta" in written


def test_a_nested_config_says_in_both_places_that_the_head_is_separate(tmp_path: Path) -> None:
    base_with(tmp_path / "base", "gemma3", {})
    file = tmp_path / "base" / "config.json"
    own = json.loads(file.read_text())
    own["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps({**own, "tie_word_embeddings": True}))
    config = AutoConfig.from_pretrained(tmp_path / "base")
    model = auto_class(config).from_pretrained(tmp_path / "base")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.save_pretrained(tmp_path / "result")
    complete_result(tmp_path / "result", str(tmp_path / "base"), None, model)
    written = json.loads((tmp_path / "result" / "config.json").read_text())
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is False
    again = auto_class(config).from_pretrained(tmp_path / "result")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_the_model_card_names_the_tensors_of_the_base() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "run_started"},
        {"kind": "weights", "source": "result", "unread": {f"mtp.{number}": "left out" for number in range(7)}},
        {"kind": "weights", "source": "merged", "unread": {}},
    ]
    told = _copied(events, "model")
    assert told.startswith("`mtp.0`, `mtp.1`") and told.endswith("and 2 more, not trained: left out")
    assert _copied(events, "merged") == _copied(events, "adapter") == ""
