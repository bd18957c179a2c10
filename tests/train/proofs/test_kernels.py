"""Proofs detect kernels that were broken on purpose, and the run continues with the reference implementation."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.determinism import deterministic_kernels
from engine.errors import EnvironmentProblem
from engine.journal.files import write_atomically
from engine.model.adapted_linear import is_ours
from engine.model.dropout_kernel import kernel_in_use, reference_drop, using
from engine.train.run.training_setup import TrainingSetup
from engine.verify import kernels, layers
from engine.verify.record import DisprovedError
from tests.train.proofs.proved import break_attention, proved, small_setup, wrong_scale

LOOK_ALIKES = Path(__file__).resolve().parents[2] / "look_alikes" / "cuda_extra"


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TrainingSetup]:
    with small_setup(tmp_path) as made:
        yield made


def zeros(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Attention that returns zeros, like a kernel whose failure was not noticed after its output was allocated."""
    output, _ = right(*given, **options)
    return output * 0.0, None


def stale(right: Callable[..., Any], *given: Any, _kept: dict[Any, Any] = {}, **options: Any) -> Any:  # noqa: B006
    """Attention whose output does not depend on its input: the same random values for all inputs of one shape, with the
    right gradients."""
    output, _ = right(*given, **options)
    return output - output.detach() + _kept.setdefault(output.shape, torch.randn_like(output)), None


def without_gradient_of_keys(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
    module, query, key, *rest = given
    return right(module, query, key.detach() + 0.0 * key, *rest, **options)


def raises(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
    raise NotImplementedError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("wrap", [wrong_scale, zeros, stale, without_gradient_of_keys, raises])
def test_broken_attention_is_not_used(wrap: Callable[..., Any], setup: TrainingSetup, tmp_path: Path) -> None:
    break_attention(setup, wrap)
    found = proved(setup, tmp_path)["attention"]
    assert found.passed is False and found.fallback == "attention = sdpa"
    assert setup.context.loaded.attention == "sdpa"
    assert setup.context.loaded.base.config._attn_implementation == "sdpa"
    assert proved(setup, tmp_path)["attention"].passed


def sees_everything(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Attention that ignores the boundaries of documents and the sliding window."""
    module, query, key, value, _ = given
    return right(module, query, key, value, None, **{**options, "is_causal": True})


WINDOWED = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 264, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 128, "sliding_window": 64,
}  # fmt: skip


@pytest.mark.parametrize("variant", ["packed rows", "a sliding window"])
def test_attention_that_ignores_documents_or_windows_is_not_used(variant: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"data": {"packing": True}}
    if variant == "a sliding window":
        write_atomically(tmp_path / "config.json", json.dumps(WINDOWED))
        tables = {"model": {"id": str(tmp_path)}}
    with small_setup(tmp_path, **tables) as setup:
        found = proved(setup, tmp_path)["attention"]
        assert found.passed and variant in found.detail
        break_attention(setup, sees_everything)
        found = proved(setup, tmp_path)["attention"]
        assert found.passed is False and f"with {variant}" in found.detail and found.fallback == "attention = sdpa"


def test_attention_without_its_sinks_is_not_used(setup: TrainingSetup, tmp_path: Path) -> None:
    module = kernels.attention_module(setup)
    module.sinks = torch.nn.Parameter(torch.linspace(-1.0, 2.0, module.config.num_attention_heads))

    def with_sinks(_right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        heads = [tensor.float() for tensor in given[1:4]]
        variant = kernels.Variant(sinks="s_aux" in options)
        return kernels.attention_reference(setup, variant, *heads).to(given[1].dtype), None

    break_attention(setup, with_sinks)
    found = proved(setup, tmp_path)["attention"]
    assert found.passed and "attention sinks" in found.detail
    break_attention(setup, lambda right, *given, s_aux=None, **options: right(*given, **options))
    found = proved(setup, tmp_path)["attention"]
    assert found.passed is False and "attention sinks" in found.detail and found.fallback == "attention = eager"


def test_a_dropout_kernel_that_draws_other_masks_is_not_used(tmp_path: Path) -> None:
    def shifted(rows_RSF: torch.Tensor, keys: Any, first: int, probability: float) -> torch.Tensor:
        return reference_drop(rows_RSF, keys, first + 1, probability)

    device = torch.device("cpu")
    with small_setup(tmp_path, method={"kind": "lora", "rank": 4, "dropout": 0.1}) as setup:
        assert "dropout" not in proved(setup, tmp_path)
        with using(reference_drop, "cpu"):
            assert proved(setup, tmp_path)["dropout"].passed
        with using(shifted, "cpu"):
            found = proved(setup, tmp_path)["dropout"]
            assert found.passed is False and "differ" in found.detail and "eleven kernels" in found.fallback
            assert kernel_in_use(device) is None


def test_a_loss_kernel_that_scales_wrongly_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.linear_cross_entropy
    with small_setup(tmp_path, train={"loss": "fused"}) as setup:
        assert setup.context.loss.implementation == "torch"
        assert proved(setup, tmp_path)["loss"].passed
        for broken in (
            lambda *given, **options: 1.05 * right(*given, **options),
            lambda hidden, *rest, **options: right(hidden.detach() + 0.0 * hidden, *rest, **options),
            lambda *given, **options: right(*given, **options).detach(),
        ):
            setup.context.loss.implementation = "torch"
            monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", broken)
            found = proved(setup, tmp_path)["loss"]
            assert found.passed is False and found.fallback == "loss = chunked"
            assert setup.context.loss.implementation == "chunked"


def test_ligers_kernel_is_used_where_it_is_right(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(LOOK_ALIKES))
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)  # the real package may be imported already
    before = set(sys.modules)
    kernel = importlib.import_module("liger_kernel.ops.cross_entropy").Kernel
    right, loss = kernel.launch, setup.context.loss

    def overwrites_nothing(self: Any, **given: Any) -> None:
        right(self, **{**given, "HAS_GRADIENTS": False})

    def fails(self: Any, **given: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please set CC.")

    loss.implementation = "liger"
    assert proved(setup, tmp_path)["loss"].passed and loss.implementation == "liger"
    for broken in (overwrites_nothing, fails):
        loss.implementation = "liger"
        monkeypatch.setattr(kernel, "launch", broken)
        found = proved(setup, tmp_path)["loss"]
        assert found.passed is False and found.fallback == "loss = chunked"
        assert loss.implementation == "chunked"
    for name in [name for name in set(sys.modules) - before if name.startswith("liger_kernel")]:
        del sys.modules[name]


def test_an_adapter_product_without_its_scaling_is_not_used(
    setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = [module for module in setup.context.loaded.model.modules() if is_ours(module)]
    assert adapted and proved(setup, tmp_path)["adapter"].passed
    right = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, a, b, *, beta=1, alpha=1: right(self, a, b, beta=beta))
    found = proved(setup, tmp_path)["adapter"]
    assert found.passed is False and found.fallback == "adapters are computed by peft"
    assert not any(is_ours(layer) for layer in adapted)
    assert "adapter" not in proved(setup, tmp_path)


@pytest.fixture
def with_nf4(setup: TrainingSetup, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingSetup]:
    """The setup of a run whose recipe quantises, with a look-alike of bitsandbytes where that is not installed."""
    monkeypatch.syspath_prepend(str(LOOK_ALIKES))
    before = set(sys.modules)
    model = setup.spec.recipe.model.model_copy(update={"quantize": "nf4"})
    recipe = setup.spec.recipe.model_copy(update={"model": model})
    yield replace(setup, spec=setup.spec.model_copy(update={"recipe": recipe}))
    for name in [name for name in set(sys.modules) - before if name.startswith("bitsandbytes")]:
        del sys.modules[name]


def test_a_4_bit_product_that_scales_wrongly_is_replaced(
    with_nf4: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.nn import Linear4bit

    assert proved(with_nf4, tmp_path)["nf4"].passed
    right = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, x: 1.05 * right(self, x))
    layer = layers.nf4_layer(with_nf4, torch.randn(layers.NF4_OUTPUTS, layers.NF4_INPUTS))
    with_nf4.context.loaded.model.add_module("extra", layer)
    found = proved(with_nf4, tmp_path)["nf4"]
    assert found.passed is False and "dequantised" in found.fallback
    x = torch.randn(3, layers.NF4_INPUTS)
    torch.testing.assert_close(layer(x), right(layer, x))


def test_weights_that_are_quantised_wrongly_end_the_run(
    with_nf4: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes.functional as functional

    right = functional.dequantize_4bit
    for module in (functional, sys.modules["bitsandbytes.nn"]):
        monkeypatch.setattr(module, "dequantize_4bit", lambda packed, quant_state: 1.5 * right(packed, quant_state))
    with pytest.raises(DisprovedError):
        layers.prove_nf4(with_nf4)
    with pytest.raises(EnvironmentProblem, match="quantises wrongly"):
        proved(with_nf4, tmp_path)


def test_a_kernel_that_is_not_deterministic_is_not_used_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    calls = itertools.count()

    def wavers(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        output, _ = right(*given, **options)
        return output * (1 + 1e-6 * next(calls)), None

    with small_setup(tmp_path, train={"deterministic": True}) as setup, deterministic_kernels(True, "metered"):
        assert proved(setup, tmp_path)["determinism"].passed
        break_attention(setup, wavers)
        found = proved(setup, tmp_path)
        assert found["attention"].passed, found["attention"]
        assert found["determinism"].passed is False
        assert setup.context.loaded.attention == "eager"
