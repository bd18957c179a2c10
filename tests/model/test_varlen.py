"""torch's varlen kernel computes what sdpa computes with a mask. The kernel needs a card: a stand-in with its signature
computes each document on the CPU."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, PreTrainedConfig

from engine.config.attention import AttentionCard, KernelChoice, choose_kernel
from engine.data.batch import Batch, Documents
from engine.device.host_syncs import host_syncs
from engine.errors import UsageError
from engine.model.attention import attention_needs, register_varlen, varlen_attention
from engine.model.decoder import hidden_states
from engine.model.loaded import LoadedModel
from engine.model.positions import separate_documents
from engine.model.trained import decoder_of
from tests.model.samples import FAMILIES, load_family

REAL = varlen.varlen_attn
TRIED = [family for family in FAMILIES if family != "gemma2"]  # soft-caps


class Kernel:
    """The stand-in; `calls` counts its documents."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        assert cu_seq_q.dtype == torch.int32
        assert window_size[1] == 0  # causal
        bounds = cu_seq_q.numpy().tolist()
        assert max_q == max_k == max(end - start for start, end in pairwise(bounds))
        self.calls.append(len(bounds) - 1)
        pieces = []
        for start, end in pairwise(bounds):
            q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
            distance_SS = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
            farthest = window_size[0] if window_size[0] >= 0 else end
            mask_SS = (distance_SS >= 0) & (distance_SS <= farthest)
            output = scaled_dot_product_attention(q, k, v, mask_SS, scale=scale, enable_gqa=enable_gqa)
            pieces.append(output[0].transpose(0, 1))
        return torch.cat(pieces)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel()
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    register_varlen()
    return stand_in


def use(loaded: LoadedModel, attention: str) -> None:
    loaded.attention = attention
    for module in decoder_of(loaded.base).modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = attention


def batch(rows: list[list[int]], *, packed: bool) -> Batch:
    """Random rows of documents of these lengths."""
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    ids_BS = torch.randint(0, 256, positions_BS.shape, generator=torch.Generator().manual_seed(3))
    lengths = [length for row in rows for length in row]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    documents = Documents(starts, max(lengths), len(lengths) == len(rows))
    return Batch(ids_BS, ids_BS, None, positions_BS if packed else None, (0,), 1, documents=documents)


def test_the_stand_in_takes_what_torch_takes() -> None:
    theirs, ours = inspect.signature(REAL).parameters, inspect.signature(Kernel().__call__).parameters
    assert list(theirs)[:7] == list(ours)[:7]
    assert set(ours) - set(theirs) <= {"enable_gqa"}  # torch 2.11 has grouped heads without it
    assert all(theirs[name].kind == ours[name].kind for name in ours if name in theirs)


def test_torch_2_11_takes_grouped_heads_without_being_told(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(*given: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        return kernel(*given, scale=scale, window_size=window_size, enable_gqa=True)

    loaded = load_family(tmp_path, "llama")
    assert loaded.base.config.num_key_value_heads < loaded.base.config.num_attention_heads
    given = batch([[9, 5]], packed=True)
    use(loaded, "varlen")
    monkeypatch.setattr(varlen, "varlen_attn", older)
    with torch.no_grad():
        found = hidden_states(loaded, given)
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        torch.testing.assert_close(found, hidden_states(loaded, given))


@pytest.mark.parametrize("rows", [[[9, 5, 4], [3, 15]], [[20]]])
@pytest.mark.parametrize("family", TRIED)
def test_documents_have_the_hidden_states_that_sdpa_gives_them(
    tmp_path: Path, kernel: Kernel, family: str, rows: list[list[int]]
) -> None:
    loaded = load_family(tmp_path, family)
    given = batch(rows, packed=len(rows[0]) > 1)
    with torch.no_grad():
        expected_BSH = hidden_states(loaded, given)
        use(loaded, "varlen")
        found: list[Tensor] = []
        assert host_syncs(lambda: found.append(hidden_states(loaded, given))) == []
    torch.testing.assert_close(found[0], expected_BSH, rtol=1e-4, atol=1e-5)
    layers = loaded.base.config.get_text_config().num_hidden_layers
    assert kernel.calls == [sum(map(len, rows))] * layers  # one call in each


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_sdpa_also_when_layers_are_recomputed(
    tmp_path: Path, kernel: Kernel, checkpointing: bool
) -> None:
    loaded = load_family(tmp_path, "mistral", method={"kind": "full"})
    loaded.set_checkpointing(checkpointing)
    gradients = []
    for attention in ("sdpa", "varlen"):
        use(loaded, attention)
        loaded.model.zero_grad()
        hidden_states(loaded, batch([[9, 11], [14, 6]], packed=True)).square().sum().backward()
        gradients.append([parameter.grad.clone() for _, parameter in loaded.trainable() if parameter.grad is not None])
    assert len(kernel.calls) == (4 if checkpointing else 2)
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_rows_that_are_whole_documents_and_generation_go_through_sdpa(tmp_path: Path, kernel: Kernel) -> None:
    loaded = load_family(tmp_path, "llama")
    loaded.model.eval()
    rows = batch([[12], [12]], packed=False)
    prompt = {"input_ids": rows.input_ids_BS, "attention_mask": torch.ones_like(rows.input_ids_BS)}
    prompt["attention_mask"][1, :5] = 0
    with torch.no_grad():
        expected = hidden_states(loaded, rows), generated(loaded, prompt)
        use(loaded, "varlen")
        found = hidden_states(loaded, rows), generated(loaded, prompt)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert kernel.calls == []


def generated(loaded: LoadedModel, prompt: dict[str, Tensor]) -> Tensor:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    model: Any = loaded.base
    tokens: Tensor = model.generate(**prompt, **options)
    return tokens


def test_a_layer_that_is_not_told_where_documents_begin_refuses(kernel: Kernel) -> None:
    query_BHSD = torch.zeros(1, 2, 8, 8)
    module = torch.nn.Identity()
    apart = separate_documents(module, None, apart=True, handed_over=True)
    with apart, pytest.raises(UsageError, match="does not receive the starts of packed"):
        varlen_attention(module, query_BHSD, query_BHSD, query_BHSD, None)


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [("gemma2", {}, "soft-cap"), ("gpt2", {"attn_pdrop": 0.1}, "drop"), ("llama", {"attention_dropout": 0.1}, "drop")],
)
def test_models_that_need_more_than_the_kernel_has_are_named(family: str, changes: dict[str, Any], word: str) -> None:
    card = AttentionCard("a card", 8.0, is_cuda=True, dtype="bfloat16")

    def chosen(config: PreTrainedConfig) -> KernelChoice:
        needs = attention_needs(config)
        return choose_kernel("varlen", needs, card, lambda kernel: None, packing=True, deterministic=False)

    assert word in chosen(AutoConfig.for_model(family, **changes)).obstacles["varlen"].reason
    assert chosen(AutoConfig.for_model("llama")).name == "varlen"
