"""Launch with a recipe of several stages: a line and a verdict for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.index import list_runs
from engine.launch.process import force_stop
from tests.tui.conftest import Opener

pytestmark = pytest.mark.asyncio

STAGED = """schema = 1
kind = "recipe"
name = "staged"
[model]
id = "builtin:tiny"
[method]
kind = "full"
[data]
max_length = 64
[[data.sources]]
name = "dates"
path = "builtin:dates"
[train]
state_dtype = "bfloat16"
[[stages]]
name = "one"
[[stages]]
name = "two"
from = "one"
[[stages]]
name = "other"
train = { batch_size = 4096, micro_batch = 4096 }
"""


async def test_a_line_per_stage_has_its_verdict_and_space_switches_it_off(
    console: Opener, runs: Path, empty_folder: Path
) -> None:
    (empty_folder / "staged.toml").write_text(STAGED)
    async with console(80, 24, profile="demo", recipe="./staged.toml") as pilot:
        await pilot.sees("1 one   ✓ fits", "2 two   ✓ fits", "3 other ◐ fits with")
        await pilot.press("space")
        await pilot.sees("1 one   off", "cannot start", 'stage "one", which this one starts from, is')
        await pilot.press("space")
        await pilot.sees("1 one   ✓ fits", "3 stages; the bar shows other")
        await pilot.press("j", "j", "space")
        await pilot.sees("3 other off", "2 stages; the bar shows")
        assert pilot.screen.state.choice.set_arguments == ["stages.other.enabled=false"]
        await pilot.press("j", "space")
        await pilot.sees("the cursor is not on a stage, which space skips or includes")
        await pilot.press("s")
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the run's screen")
        await pilot.sees('train.state_dtype = "bfloat16" has no effect')
        (run,) = list_runs(runs)
        force_stop(run)
    assert "enabled = false" in run.run_toml.read_text()
