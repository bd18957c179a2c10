"""LoRA layers that read the same input share one product with their A's: output and gradients are peft's, the input is
held once, and a layer that gets another tensor is computed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.adapted_linear import SHARED, compute_in_input_dtype

ROWS, TOKENS, INPUTS, RANK = 2, 16, 48, 4
NAMES = ["q_proj", "k_proj", "v_proj"]


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, called: list[str]) -> None:
        super().__init__()
        for name, outputs in zip(NAMES, (80, 32, 32), strict=True):
            setattr(self, name, nn.Linear(INPUTS, outputs, dtype=dtype))
        self.called = called
        self.turned: set[str] = set()
        """The layers that get another tensor than the rest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {name: x + 0 if name in self.turned else x for name in self.called}
        return torch.cat([self.get_submodule(name)(given[name]) for name in self.called], dim=-1)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, called: list[str] = NAMES) -> None:
        super().__init__()
        self.attention = Attention(dtype, called)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x)
        return output


def adapted(dtype: torch.dtype = torch.float32, called: list[str] = NAMES, **config: Any) -> Any:
    torch.manual_seed(3)
    options = {"r": RANK, "lora_alpha": 12, "target_modules": NAMES, "init_lora_weights": False, **config}
    return get_peft_model(Model(dtype, called), LoraConfig(**options))


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(model: Any, x: torch.Tensor, *, follows: bool = True) -> list[torch.Tensor]:
    """Output, gradient of x (if the layers follow trained ones) and of each adapter weight that has one."""
    x = x.detach().requires_grad_(follows)
    output = checkpoint(model, x, use_reentrant=False)
    (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    found = [output.detach(), *([x.grad] if x.grad is not None else [])]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("config", [{}, {"rank_pattern": {"k_proj": 7}, "alpha_pattern": {"v_proj": 3}}], ids=str)
def test_output_and_gradients_are_those_of_peft(config: dict[str, Any], follows: bool) -> None:
    model = adapted(**config)
    theirs = run(model, inputs(), follows=follows)
    compute_in_input_dtype(model)
    calls = _count_products(model)
    ours = run(model, inputs(), follows=follows)
    assert len(calls) == 2, "one product with all A's, in forward and in its recomputation"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    twice = run(model, inputs(), follows=follows)
    assert all(torch.equal(one, other) for one, other in zip(ours, twice, strict=True))


def _count_products(model: Any) -> list[int]:
    """A list that grows at each product with the A's of several layers."""
    group = getattr(model.base_model.model.attention.q_proj, SHARED)
    calls: list[int] = []
    begin = group._begin

    def counted(*given: Any) -> Any:
        calls.append(1)
        return begin(*given)

    group._begin = counted
    return calls


def test_half_precision_is_as_exact_as_peft() -> None:
    exact = run(adapted().float(), inputs(torch.bfloat16).float())
    model = adapted(torch.bfloat16)
    reference = [p.detach().clone() for p in model.parameters()]
    exact_model = adapted()
    for one, other in zip(exact_model.parameters(), reference, strict=True):
        one.data.copy_(other)
    exact = run(exact_model, inputs(torch.bfloat16).float())
    theirs = run(model, inputs(torch.bfloat16))
    compute_in_input_dtype(model)
    for mine, other, right in zip(run(model, inputs(torch.bfloat16)), theirs, exact, strict=True):
        error, their_error = ((tensor.float() - right).norm() / right.norm() for tensor in (mine, other))
        assert error < max(1.2 * their_error, 2**-7)


@pytest.mark.parametrize("called", [["q_proj", "v_proj"], ["k_proj", "v_proj", "q_proj"], ["q_proj"]], ids=str)
def test_layers_that_are_left_out_or_come_in_another_order_leave_nothing_behind(called: list[str]) -> None:
    model = adapted(called=called)
    theirs = run(model, inputs())
    compute_in_input_dtype(model)
    found = run(model, inputs())
    assert getattr(model.base_model.model.attention.q_proj, SHARED)._pass is None
    compared = [each for each in found if each.any()]  # a layer that is not called gets a gradient of zeros
    torch.testing.assert_close(compared, theirs, rtol=1e-5, atol=1e-4)


def test_a_layer_that_gets_another_tensor_is_computed_alone() -> None:
    model = adapted()
    model.base_model.model.attention.turned = {"k_proj"}
    theirs = run(model, inputs())
    compute_in_input_dtype(model)
    torch.testing.assert_close([each for each in run(model, inputs()) if each.any()], theirs, rtol=1e-5, atol=1e-4)


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    model = adapted()
    compute_in_input_dtype(model)
    attention = model.base_model.model.attention
    failing = attention.k_proj.base_layer.register_forward_pre_hook(_fail)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, inputs())
    assert getattr(attention.q_proj, SHARED)._pass is None
    failing.remove()
    again = run(model, inputs())
    fresh = adapted()
    compute_in_input_dtype(fresh)
    assert all(torch.equal(one, other) for one, other in zip(again, run(fresh, inputs()), strict=True))


def _fail(*_: object) -> None:
    raise torch.OutOfMemoryError("no room for the product")


def test_a_saved_adapter_opens_in_peft_with_the_same_logits(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **shape))
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    compute_in_input_dtype(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(40).view(2, 20)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(str(tmp_path))
    with torch.no_grad():
        ours = model(ids).logits
        plain = LlamaForCausalLM(base.config)
        plain.load_state_dict(weights)
        theirs = PeftModel.from_pretrained(plain, tmp_path)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
