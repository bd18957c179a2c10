"""The Launch screen for a family without a closed form: it can be used while a step is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget.metered_step import folder_of
from tests.tui.conftest import Opener, console, runs

__all__ = ["console", "runs"]

SMALL = {
    "model_type": "opt", "vocab_size": 300, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.asyncio
async def test_the_plan_comes_when_it_is_simulated(console: Opener, tmp_path: Path) -> None:
    settings = {"profile": "demo", "recipe": "demo", "overrides": [f"model.id={folder_of(SMALL, tmp_path / 'opt')}"]}
    async with console(120, 36) as pilot:
        await pilot.press("1")
        pilot.app.open_screen("launch", settings)
        await pilot.sees("simulating")
        refusal = pilot.screen.state.evaluated.start_refusal("start")
        assert "simulating its memory" in refusal
        await pilot.until(lambda: pilot.screen.state.evaluated.plan is not None, "the plan")
        assert pilot.screen.state.evaluated.plan.predictor == "simulated"
        await pilot.until(lambda: pilot.screen.state.advice() is not None, "advice")
