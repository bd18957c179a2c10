"""Make every single allocation of a training step fail, one at a time: afterwards the bytes that the meter counts equal
those of the static tensors exactly."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.device.metered import MeteredDevice
from engine.device.oom import classify, flush_autograd, frozen_gc
from tests.present import present

WIDTH, LENGTH = 16, 8


class Block(torch.nn.Module):
    """Attention and a gated feed-forward layer, small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mix = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(hidden_BSH)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BSH = hidden_BSH + attended.transpose(1, 2).flatten(2)
        gate, up = self.up(hidden_BSH).chunk(2, -1)
        added: torch.Tensor = self.down(torch.nn.functional.silu(gate) * up)
        return hidden_BSH + added


class Step:
    """A model, its optimizer with materialised state, and one full step on a fixed batch."""

    def __init__(self, *, recompute: bool, fused: bool) -> None:
        torch.manual_seed(0)
        self.recompute = recompute
        self.embed = torch.nn.Embedding(32, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.parameters = [*self.embed.parameters(), *self.blocks.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=fused)
        self.ids = torch.randint(0, 32, (4, LENGTH))
        self()
        self.drop()

    def __call__(self) -> None:
        for ids in self.ids.split(2):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
            logits = hidden @ self.embed.weight.t()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def drop(self) -> None:
        """Free what a recovery frees: the gradients, then the tensors that autograd's engine still holds."""
        self.optimizer.zero_grad(set_to_none=True)
        flush_autograd()
        gc.collect()


def fails(step: Step) -> bool:
    """Whether the step ran out of memory. The exception, whose traceback holds tensors, is freed before the return."""
    try:
        step()
    except torch.OutOfMemoryError as error:
        assert present(classify(error)).kind == "device"
        return True
    return False


@pytest.fixture
def quick_collector() -> Iterator[None]:
    """Exclude existing objects from garbage collection, because each of hundreds of steps runs a collection."""
    with frozen_gc():
        yield


@pytest.mark.usefixtures("quick_collector")
@pytest.mark.parametrize(("recompute", "fused"), [(False, True), (True, True), (False, False)])
def test_after_any_failed_allocation_only_the_static_tensors_are_left(recompute: bool, fused: bool) -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        step = Step(recompute=recompute, fused=fused)
        static_bytes, before = device.memory().allocated_bytes, device.allocations
        assert not fails(step)
        requests = device.allocations - before
        step.drop()
        assert device.memory().allocated_bytes == static_bytes
        assert requests > 100
        for allocation in range(1, requests + 1):
            device.fail_at(allocation)
            assert fails(step), f"allocation {allocation} of {requests} did not fail"
            step.drop()
            assert device.memory().allocated_bytes == static_bytes, f"left over after allocation {allocation}"


def test_without_the_flush_a_failed_backward_keeps_its_activations() -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        leaf = torch.ones(1024, requires_grad=True)
        static_bytes = device.memory().allocated_bytes

        def forward_and_failing_backward() -> None:
            loss = (leaf.exp().sin() + leaf.cos().exp()).sum()  # one branch waits in the queue while the other fails
            device.fail_at(2)
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()

        forward_and_failing_backward()
        leaf.grad = None
        gc.collect()
        assert device.memory().allocated_bytes > static_bytes
        flush_autograd()
        assert device.memory().allocated_bytes == static_bytes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_flush_works_on_a_full_device_in_any_grad_mode(mode: type) -> None:
    device = MeteredDevice(4096)
    with device.activate():
        kept = torch.ones(1024)
        device.fail_at(1)
        requests = device.allocations
        with mode():
            flush_autograd()
        assert device.allocations == requests
        assert device.memory().allocated_bytes == kept.untyped_storage().nbytes()


def test_a_transformers_model_with_adapters_trains_generates_and_leaves_nothing() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen2Config

    warnings.simplefilter("ignore")
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    device = MeteredDevice(2**30)
    with device.activate():
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules="all-linear"))
        ids = torch.randint(0, 64, (2, 12))
        gc.collect()
        held = {tensor.untyped_storage()._cdata: tensor for tensor in [*model.parameters(), *model.buffers(), ids]}
        static_bytes = sum((tensor.untyped_storage().nbytes() + 511) // 512 * 512 for tensor in held.values())
        assert device.memory().allocated_bytes == static_bytes
        model(input_ids=ids, labels=ids).loss.backward()
        assert device.memory().peak_bytes > static_bytes
        model.zero_grad(set_to_none=True)
        model.eval()
        device.reset_peak()
        generate: Any = model.generate
        generated = generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert generated.shape == (2, 16)
        assert device.memory().peak_bytes > static_bytes
        del generated, generate
        gc.collect()
        assert device.memory().allocated_bytes == static_bytes
        del model, held, ids
        gc.collect()
        assert device.memory().allocated_bytes == 0
