"""Loading a model: seeds, dtypes, attention, earlier runs, and every reason for a refusal."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.schema.recipe import Model
from engine.device.metered import MeteredDevice
from engine.errors import EnvironmentProblem, UsageError
from engine.journal.directory import RunDirectory
from engine.model.config import model_config_dict
from engine.model.load import load_model
from engine.model.loss import make_loss
from engine.model.reference import find_run_weights, find_starting_weights
from tests.model.samples import batch_of, cpu, disturb, load, load_family, logits_of, name_base, run_spec, write_model
from tests.present import grad_of


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give huggingface_hub an empty cache and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))


def test_the_seed_alone_decides_the_initial_weights() -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        return load(run_spec(train={"seed": seed})).model.state_dict()

    first, again, other = start(1), start(1), start(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_loading_leaves_the_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(run_spec())
    assert torch.equal(torch.rand(3), expected)


def test_the_builtin_model_has_the_size_the_budget_knows() -> None:
    loaded = load(run_spec(method={"kind": "full"}))
    sizes = [parameter.numel() for parameter in loaded.model.parameters()]
    assert sum(sizes) == sum(parameter.numel() for _, parameter in loaded.trainable()) == 822_400
    assert not loaded.model.config.use_cache
    assert loaded.model.training


def test_the_config_is_the_base_models_also_behind_an_adapter(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "llama")
    loaded.save(tmp_path / "adapter")
    name_base(tmp_path / "adapter", tmp_path / "llama")
    config = model_config_dict(run_spec(str(tmp_path / "adapter")))
    assert (config["model_type"], config["hidden_size"]) == ("llama", 32)


def test_random_weights_have_the_real_shapes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    loaded = load(run_spec(str(folder), init="random"))
    assert loaded.base.get_input_embeddings().weight.shape == (264, 32)
    assert not loaded.base_exists_elsewhere


@pytest.mark.parametrize(
    ("dtype", "kind", "base", "trained", "autocast"),
    [
        ("auto", "lora", torch.float32, torch.float32, None),
        ("bfloat16", "lora", torch.bfloat16, torch.float32, None),
        ("float16", "lora", torch.float16, torch.float32, None),
        ("bfloat16", "full", torch.bfloat16, torch.bfloat16, None),
        ("float16", "full", torch.float32, torch.float32, torch.float16),
    ],
)
def test_dtypes(dtype: str, kind: str, base: torch.dtype, trained: torch.dtype, autocast: torch.dtype | None) -> None:
    loaded = load(run_spec(method={"kind": kind}, dtype=dtype))
    assert loaded.base.get_input_embeddings().weight.dtype == base
    assert {parameter.dtype for _, parameter in loaded.trainable()} == {trained}
    assert loaded.autocast_dtype == autocast
    assert loaded.needs_loss_scaling == (dtype == "float16")
    loss = make_loss(loaded, implementation="auto", label_smoothing=0.0, chunk_tokens=8, device=cpu())
    total = loss(batch_of())
    total.backward()
    assert total.dtype == torch.float32
    assert all(bool(grad_of(p).isfinite().all()) for _, p in loaded.trainable())
    reference = load(run_spec(method={"kind": kind}, dtype="float32"))
    reference.model.load_state_dict({k: v.float() for k, v in loaded.model.state_dict().items()})
    exact = make_loss(reference, implementation="plain", label_smoothing=0.0, chunk_tokens=8, device=cpu())
    torch.testing.assert_close(total.detach(), exact(batch_of()).detach(), rtol=5e-3, atol=0)


def test_bfloat16_adapters_where_asked() -> None:
    loaded = load(run_spec(method={"adapter_dtype": "bfloat16"}, dtype="bfloat16"))
    assert {parameter.dtype for _, parameter in loaded.trainable()} == {torch.bfloat16}


def test_families_that_overflow_in_float16_are_warned_of(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gemma2", "gemma2")
    assert any("overflow" in notice for notice in load(run_spec(str(folder), dtype="float16")).notices)
    assert not load(run_spec(str(folder), dtype="bfloat16")).notices


def test_a_soft_capped_attention_never_gets_sdpa(tmp_path: Path) -> None:
    assert load_family(tmp_path, "gemma2").attention == "eager"
    assert load_family(tmp_path, "llama").attention == "sdpa"
    with pytest.raises(UsageError, match="sdpa"):
        load(run_spec(str(tmp_path / "gemma2"), attention="sdpa"))


def test_what_needs_cuda_says_so() -> None:
    with pytest.raises(EnvironmentProblem, match="CUDA"):
        load(run_spec(attention="flash"))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_what_needs_bitsandbytes_says_so() -> None:
    with pytest.raises(EnvironmentProblem, match="bitsandbytes"):
        load(run_spec(quantize="nf4"))


def test_the_metered_device_counts_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    device = MeteredDevice(2**30)
    with device.activate():
        loaded = load(run_spec(str(folder), device="metered"), device)
        weights_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        assert weights_bytes <= device.memory().allocated_bytes <= 1.5 * weights_bytes + 2**16


def test_continuing_a_run_by_step_best_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "20261120T000000Z-first")
    run.checkpoints.mkdir(parents=True)
    run.run_toml.write_text('name = "first"\n', encoding="utf-8")
    run.events.touch()
    loaded = load(run_spec())
    disturb(loaded)
    for folder in (run.adapter, run.checkpoint(10) / "weights"):
        loaded.save(folder)
    (run.checkpoints / "best").write_text(json.dumps({"step": 10}), encoding="utf-8")
    text = f"run:{run.path}"
    assert find_run_weights(text) == run.adapter
    assert find_run_weights(text + "@10") == find_run_weights(text + "@best") == run.checkpoint(10) / "weights"
    start = find_starting_weights(Model(id=text + "@best"))
    assert (Path(start.base).name, start.adapter) == ("base", str(run.checkpoint(10) / "weights"))
    assert torch.equal(logits_of(load(run_spec(text)).model, batch_of()), logits_of(loaded.model, batch_of()))
    with pytest.raises(UsageError, match="does not exist") as caught:
        find_run_weights(text + "@11")
    assert "10" in caught.value.fix


def test_full_fine_tuning_does_not_go_on_from_an_adapter(tmp_path: Path) -> None:
    load(run_spec()).save(tmp_path / "adapter")
    with pytest.raises(UsageError, match="is an adapter"):
        load(run_spec(str(tmp_path / "adapter"), method={"kind": "full"}))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load(run_spec(str(tmp_path), tokenizer="builtin:bytes"))


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        load(run_spec(str(tmp_path / "nowhere"), tokenizer="builtin:bytes"))


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    for path in folder.glob("*.safetensors"):
        path.rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"only pytorch_model\.bin"):
        load(run_spec(str(folder)))


def test_a_damaged_weight_file_is_a_clear_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cannot load the model"):
        load(run_spec(str(folder)))


@pytest.mark.parametrize(("rows", "found"), [(0, "are missing"), (3, "different shape")])
def test_weights_that_would_be_filled_with_random_ones_are_refused(tmp_path: Path, rows: int, found: str) -> None:
    folder, name = write_model(tmp_path / "model", "llama"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    short = tensors.pop(name)[:rows].clone()
    save_file(tensors | ({name: short} if rows else {}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=found) as caught:
        load(run_spec(str(folder)))
    assert caught.value.found.startswith("1 weights of ") and name in caught.value.found


def test_weights_that_give_no_finite_logits_are_refused(tmp_path: Path) -> None:
    loaded = load_family(tmp_path, "llama")
    with torch.no_grad():
        loaded.base.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UsageError, match="not finite"):
        make_loss(loaded, implementation="auto", label_smoothing=0.0, chunk_tokens=None, device=cpu())


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    with pytest.raises(UsageError, match="not a causal language model"):
        load(run_spec(str(tmp_path), tokenizer="builtin:bytes"))


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "code.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    with pytest.raises(UsageError, match="does not run by default") as caught:
        load(run_spec(str(folder), tokenizer="builtin:bytes"))
    assert "--trust-remote-code" in caught.value.fix


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("tokenizer", [None, "builtin:bytes"])
def test_a_hub_model_without_network_says_what_to_do(tokenizer: str | None) -> None:
    with pytest.raises(EnvironmentProblem, match="not reachable") as caught:
        load(run_spec("someone/some-model", tokenizer=tokenizer))
    assert "HF_HUB_OFFLINE" in caught.value.fix


def test_a_model_without_memory_has_the_parameters_of_the_real_one_also_where_an_adapter_goes_on(
    tmp_path: Path,
) -> None:
    first = load_family(tmp_path, "qwen2")
    first.save(tmp_path / "result")
    name_base(tmp_path / "result", tmp_path / "qwen2")
    spec = run_spec(str(tmp_path / "result"))
    real, bare = (load_model(spec, cpu(), first.tokenizer, torch.device(place)) for place in ("cpu", "meta"))
    shapes = [
        [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in loaded.model.named_parameters()]
        for loaded in (real, bare)
    ]
    assert shapes[0] == shapes[1]
    assert {parameter.device.type for parameter in bare.model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("device", "layers", "said"),
    [("cuda", ["linear_attention", "full_attention"], True), ("cuda", ["full_attention"], False),
     ("metered", ["linear_attention"], False)],
)  # fmt: skip
def test_linear_attention_without_its_kernels_is_told(
    device: str, layers: list[str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.model import load as loading

    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(layer_types=layers))
    monkeypatch.setattr(loading, "is_flash_linear_attention_available", lambda: False)
    notices = loading._linear_attention(config, device)
    assert bool(notices) == said and all("flash-linear-attention" in notice for notice in notices)
    monkeypatch.setattr(loading, "is_flash_linear_attention_available", lambda: True)
    assert loading._linear_attention(config, device) == []
