"""Every key of recipes and profiles is read: two values of it give another run, plan or refusal.

What the two values are, and where the difference shows, is in `tests/config/schema_walk.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.budget.metered_step import QWEN2, folder_of
from tests.config.schema_probes import accepted
from tests.config.schema_walk import CASES, all_keys, outcome
from tests.train.preference_rows import write_pairs
from tests.train.run_helpers import write_samples
from tests.vision_models import write_boxes, write_qwen2_vl

RECIPE = """\
schema = 1
kind = "recipe"
name = "walk"

[model]
id = "builtin:tiny"
tokenizer = "builtin:bytes"
init = "random"
dtype = "float32"

[method]
kind = "full"

[data]
max_length = 64

[[data.sources]]
name = "main"
path = "{samples}"

[[data.sources]]
name = "second"
path = "{chats}"

[train]
max_steps = 2
batch_size = 8
learning_rate = 1e-3

[checkpoint]
every_minutes = 0

[generate]
max_new_tokens = 4
"""

PROFILE = """\
schema = 1
kind = "profile"
name = "walk"

[device]
kind = "metered"
memory_gib = 8.0
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The path of each file that cases refer to by a word such as PROFILE, by that word."""
    folder = tmp_path_factory.mktemp("walk")
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(6)))
    found = {
        "SAMPLES": write_samples(folder / "samples.jsonl", count=12, longest=30),
        "OTHERS": write_samples(folder / "others.jsonl", count=5, seed=1, longest=30),
        "LONG": write_samples(folder / "long.jsonl", count=12, longest=400),
        "CHATS": chats,
        "PAIRS": write_pairs(folder / "pairs.jsonl", count=12, longest=8),
        "DROPS": folder_of({**QWEN2, "attention_dropout": 0.1}, folder / "drops"),
        "MODEL": folder_of(QWEN2, folder / "model"),
        "VLM": write_qwen2_vl(folder / "vlm"),
        "BOXES": write_boxes(folder / "boxes", count=3),
        "RECIPE": folder / "walk.toml",
        "PROFILE": folder / "profile" / "walk.toml",
    }
    found["PROFILE"].parent.mkdir()
    _write_revisions("walk/model")
    found["BROKEN"] = folder / "broken.jsonl"
    found["BROKEN"].write_text(found["SAMPLES"].read_text() + "torn\n")
    found["RECIPE"].write_text(RECIPE.format(samples=found["SAMPLES"], chats=chats))
    found["PROFILE"].write_text(PROFILE)
    return found


def _write_revisions(model: str) -> None:
    """Put two revisions of a model, with different sizes, into the hub cache of these tests."""
    cache = Path(os.environ["HF_HOME"], "hub", f"models--{model.replace('/', '--')}")
    for name, commit, config in (("main", "a" * 40, QWEN2), ("v9", "b" * 40, {**QWEN2, "num_hidden_layers": 3})):
        folder_of(config, cache / "snapshots" / commit)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)


def test_every_key_of_the_schema_has_a_case() -> None:
    assert set(CASES) == all_keys()


@pytest.mark.parametrize("key", CASES)
def test_two_values_of_a_key_differ(key: str, files: dict[str, Path], tmp_path: Path) -> None:
    case = CASES[key]
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = outcome(case, key, case.first, files, tmp_path / "first")
    second = outcome(case, key, case.second, files, tmp_path / "second")
    assert first[0], first[1]
    assert first != second
    assert second[0] is not (case.refused or case.probe is accepted), second[1]
