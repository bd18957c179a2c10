"""Packed documents do not see each other: the logits of a packed row are those of its documents alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.budget.architecture.packing_support import why_documents_mix
from engine.errors import UsageError
from engine.model.config import check_packing
from tests.data.specs import run_spec
from tests.model.samples import FAMILIES

LENGTHS = ((11, 5, 4), (3, 17))


def build(family: str, attention: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(family, **FAMILIES[family])
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


PAIRS = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
PAIRS.remove(("gemma2", "sdpa"))
"""transformers has no sdpa with a soft-cap; engine.model.attention never chooses it."""


@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_packed_documents_have_the_logits_they_have_alone(family: str, attention: str) -> None:
    model = build(family, attention)
    assert why_documents_mix(model.config.to_dict()) is None
    generator = torch.Generator().manual_seed(2)
    rows = [[torch.randint(0, 256, (length,), generator=generator) for length in row] for row in LENGTHS]
    ids_BS = torch.stack([torch.cat(row) for row in rows])
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    with torch.no_grad():
        packed_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
        alone = [torch.cat([model(input_ids=doc[None], use_cache=False).logits[0] for doc in row]) for row in rows]
    torch.testing.assert_close(packed_BSV, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_families_with_a_running_state_are_refused() -> None:
    assert "state" in (why_documents_mix({"model_type": "mamba"}) or "")
    mixed = {"model_type": "something_new", "layer_types": ["full_attention", "linear_attention"]}
    assert "state" in (why_documents_mix(mixed) or "")


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_families_blind_to_positions_are_refused(model_type: str) -> None:
    assert "position ids" in (why_documents_mix({"model_type": model_type}) or "")


def test_packing_is_refused_where_documents_would_mix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 264}')
    data = {"sources": [{"name": "main", "path": "builtin:dates"}], "packing": True}
    with pytest.raises(UsageError, match="packed documents would run into each other"):
        check_packing(run_spec(data, model={"id": str(tmp_path)}))
    check_packing(run_spec({**data, "packing": False}, model={"id": str(tmp_path)}))
