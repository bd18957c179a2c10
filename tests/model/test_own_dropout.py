"""The model's own dropout: masks that depend on the sample alone, and a warning for what cannot have such masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

from engine.errors import UsageError
from engine.model.dropout import FunctionalDropout, KeyedDropout, keyed, keyed_dropouts, settle_dropout
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from tests.model.samples import FAMILIES, VOCABULARY, batch_of, cpu, load, run_spec, write_model

P = 0.3
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "word_embed_proj_dim": 32, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 258,
}  # fmt: skip
DROPPING: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": P, "resid_pdrop": P, "embd_pdrop": P},
    "opt": {"dropout": P, "attention_dropout": P},
    "llama": {"attention_dropout": P},
    "gpt_neox": {"hidden_dropout": P, "attention_dropout": P},
    "phi3": {"resid_pdrop": P},
}


def dropping(folder: Path, family: str, attention: str = "eager", **model: Any) -> LoadedModel:
    """A tiny model whose config has dropout."""
    if family == "opt":
        FAMILIES.setdefault("opt", OPT)
    written = write_model(folder / family, family, **DROPPING[family])
    return load(run_spec(str(written), method={"kind": "full"}, attention=attention, **model))


def gradients(loaded: LoadedModel, splits: list[list[int]], step: int = 3) -> list[torch.Tensor]:
    """The gradients of a batch of four, cut into micro-batches."""
    loss = make_loss(loaded, implementation="chunked", label_smoothing=0.0, chunk_tokens=8, device=cpu())
    batch = batch_of(rows=4)
    loaded.model.zero_grad()
    for rows in splits:
        labels, mask = batch.labels_BS[rows], batch.attention_mask_BS
        assert mask is not None
        targets = int((labels[:, 1:] != -100).sum())
        part = type(batch)(batch.input_ids_BS[rows], labels, mask[rows], None, tuple(rows), targets)
        with keyed(keyed_dropouts(loaded.model), seed=7, step=step, sample_ids=part.sample_ids):
            (loss(part) / batch.target_tokens).backward()
    return [parameter.grad.clone() for _, parameter in loaded.trainable() if parameter.grad is not None]


def apart(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The norm of the difference of two lists of tensors, relative to the norm of `right`."""
    difference = sum(float((a - b).norm() ** 2) for a, b in zip(left, right, strict=True))
    return float((difference / sum(float(b.norm() ** 2) for b in right)) ** 0.5)


@pytest.mark.parametrize("family", DROPPING)
def test_no_split_and_no_recomputation_changes_a_mask(family: str, tmp_path: Path) -> None:
    loaded = dropping(tmp_path, family)
    assert loaded.checkpointing
    whole = gradients(loaded, [[0, 1, 2, 3]])
    assert apart(gradients(loaded, [[3, 1], [0, 2]]), whole) < 1e-5
    assert apart(gradients(loaded, [[2], [0, 1, 3]]), whole) < 1e-5
    assert apart(gradients(loaded, [[0, 1, 2, 3]], step=4), whole) > 1e-2
    loaded.set_checkpointing(False)
    assert apart(gradients(loaded, [[0, 1, 2, 3]]), whole) < 1e-6


def test_what_is_dropped_is_what_the_config_says(tmp_path: Path) -> None:
    """Each kind of dropout in the config changes the gradients in its own way; if all are 0, no dropout module is
    keyed."""
    seen = []
    for key in (None, "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        DROPPING["gpt2"] = {name: P if name == key else 0.0 for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
        loaded = dropping(tmp_path / str(key), "gpt2")
        seen.append(gradients(loaded, [[0, 1, 2, 3]]))
        assert bool(keyed_dropouts(loaded.model)) == (key is not None)
    DROPPING["gpt2"] = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), P)
    assert all(apart(each, other) > 1e-2 for place, each in enumerate(seen) for other in seen[:place])


def test_functional_calls_are_named_after_the_module_and_numbered() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = functional.dropout(x, 0.5, self.training)
            self.inner(x)
            return torch.stack([first, functional.dropout(x, 0.5, self.training)])

    model = Twice()
    calls = FunctionalDropout(model)
    with keyed([calls], seed=0, step=1, sample_ids=[4, 9]):
        first, second = model(torch.ones(2, 10, 4))
        again = model(torch.ones(2, 10, 4))
    modules = []
    for number in (1, 2):
        module = KeyedDropout(0.5, f".dropout{number}").train()
        with keyed([module], seed=0, step=1, sample_ids=[4, 9]):
            modules.append(module(torch.ones(2, 10, 4)))
    assert torch.equal(torch.stack([first, second]), again)
    assert torch.equal(first, modules[0]) and torch.equal(second, modules[1])
    assert torch.equal(model.eval()(torch.ones(2, 10, 4)), torch.ones(2, 2, 10, 4))


def test_a_forward_that_fails_leaves_no_module_running() -> None:
    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise torch.OutOfMemoryError("as a device says it")
            return functional.dropout(x, 0.5, self.training)

    model = Failing()
    calls = FunctionalDropout(model)
    with keyed([calls], seed=0, step=1, sample_ids=[4, 9]):
        expected = model(torch.ones(2, 3, 4))
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(1, 3, 4))
        assert torch.equal(model(torch.ones(2, 3, 4)), expected)


def test_heads_and_samples_have_masks_of_their_own_that_padding_leaves_alone() -> None:
    layer = KeyedDropout(0.5, "attn").train()
    with keyed([layer], seed=0, step=1, sample_ids=[4, 9]):
        together = layer(torch.ones(2, 3, 12, 12))
    with keyed([layer], seed=0, step=1, sample_ids=[9]):
        alone = layer(torch.ones(1, 3, 8, 8))
    assert torch.equal(together[1, :, :8, :8], alone[0])
    flat = together.flatten(0, 1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(6) for j in range(i))
    with keyed([layer], seed=0, step=1, sample_ids=[4, 9]):
        assert torch.equal(layer(torch.ones(6, 12, 12)), flat)
        with pytest.raises(UsageError, match=r"a tensor of shape \(3, 12, 12\)"):
            layer(torch.ones(3, 12, 12))


@pytest.mark.parametrize(
    ("kernel", "asked", "cuda", "kept", "words"),
    [
        ("eager", "auto", False, True, None),
        ("eager", "off", False, False, None),
        ("sdpa", "auto", True, False, 'model.attention_dropout = "keep"'),
        ("sdpa", "off", True, False, None),
        ("sdpa", "keep", True, True, None),
        ("flash_attention_2", "keep", True, True, None),
        ("flash_attention_4", "keep", True, False, "flash_attention_4 does not support dropout"),
    ],
)
def test_attention_dropout_is_kept_where_its_masks_are_keyed_or_where_the_recipe_says_so(
    kernel: str, asked: Any, cuda: bool, kept: bool, words: str | None
) -> None:
    config = AutoConfig.for_model("llama", attention_dropout=0.1)
    notices = settle_dropout(config, kernel, asked, cuda=cuda, shared=False)
    assert config.attention_dropout == (0.1 if kept else 0.0)
    assert len(notices) == (words is not None)
    assert words is None or words in notices[0]


def test_ranks_that_share_sequences_skipped_layers_and_vision_encoders_have_no_dropout() -> None:
    llama = AutoConfig.for_model("llama", attention_dropout=0.1)
    assert "parts of the masks" in settle_dropout(llama, "eager", "auto", cuda=True, shared=True)[0]
    opt = AutoConfig.for_model("opt", dropout=0.1, layerdrop=0.2)
    (notice,) = settle_dropout(opt, "eager", "auto", cuda=True, shared=False)
    assert "layerdrop" in notice and (opt.layerdrop, opt.dropout) == (0.0, 0.1)
    gemma = AutoConfig.for_model("gemma3", vision_config={"attention_dropout": 0.1})
    (notice,) = settle_dropout(gemma, "eager", "auto", cuda=True, shared=False)
    assert "vision_config.attention_dropout" in notice and gemma.vision_config.attention_dropout == 0.0


def test_the_run_says_what_was_switched_off_and_trains_without(tmp_path: Path) -> None:
    loaded = dropping(tmp_path, "llama", attention="sdpa")
    assert [notice for notice in loaded.notices if "attention_dropout = 0.3" in notice]
    assert not keyed_dropouts(loaded.model)
    assert not dropping(tmp_path / "off", "llama", attention="sdpa", attention_dropout="off").notices
