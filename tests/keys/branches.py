"""The branches of a run: for each a profile, a recipe and their files, and how a changed key is observed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.commands.train import finish_run
from engine.config.load import Resolved, dump_run_spec, load_run_spec, resolve
from engine.evaluate.run import with_overrides
from engine.journal.directory import RunDirectory, create_run_directory
from engine.launch.resume_run import change_spec
from engine.train.run.main import run
from tests.keys import observe
from tests.keys.observe import Observation, Seen
from tests.model.samples import name_base, write_model
from tests.train.preference_rows import write_pairs
from tests.vision_models import detection_source, write_boxes, write_qwen2_vl

PROFILE: dict[str, Any] = {"device": {"kind": "cpu", "memory_gib": 8.0}}
RECIPE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "method": {"kind": "lora", "rank": 4},
    "data": {"max_length": 64, "broken": "skip", "workers": 0},
    "train": {"max_steps": 3, "batch_size": 4, "learning_rate": 0.5, "micro_batch": 2},
    "checkpoint": {"every_steps": 2, "every_minutes": 0.0},
    "eval": {"every_steps": 2, "samples": 1},
    "evaluate": {"log_samples": 1},
    "generate": {"max_new_tokens": 4},
}


@dataclass(frozen=True)
class Branch:
    """One branch of a run."""

    name: str
    profile: Path
    recipe: Path
    words: tuple[str, ...]
    """What text may be: names of layers and files that there are, and nonsense."""
    observations: tuple[Observation, ...]
    resumed: Path | None = None
    """A finished run, which is resumed with the change."""
    others: tuple[str, ...] = ("eval.every_steps=1", "train.learning_rate=0.1", "checkpoint.keep=1")
    """Settings of other keys with which a value is tried that does nothing without them."""
    scored: bool = False
    """The change is made when a run is scored."""

    def resolve(self, sets: Sequence[str], folder: Path) -> Resolved:
        """The run spec with `--set`. Raises TunedeckError for what is refused."""
        if self.scored:
            resolved = resolve(str(self.profile), str(self.recipe))
            return Resolved(with_overrides(resolved.spec, sets), resolved.notices)
        return resolve(str(self.profile), str(self.recipe), sets)

    def resume(self, sets: Sequence[str], folder: Path) -> tuple[list[str], RunDirectory]:
        """A copy of the finished run with the change, and the notices of `tunedeck resume`."""
        assert self.resumed is not None
        place = RunDirectory(folder / self.resumed.name)
        shutil.copytree(self.resumed, place.path)
        return change_spec(place, ["train.max_steps=7", *sets], {}), place


def write(folder: Path, name: str, recipe: dict[str, Any], profile: dict[str, Any] = PROFILE) -> tuple[Path, Path]:
    """The files of a profile and a recipe."""
    from tomlkit import dumps

    paths = folder / f"{name}-profile.toml", folder / f"{name}.toml"
    paths[0].write_text(dumps({"kind": "profile", **profile}))
    paths[1].write_text(dumps({"kind": "recipe", **recipe}))
    return paths


def merged(base: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    """Tables laid over each other."""
    found = dict(base)
    for tables in more:
        for name, table in tables.items():
            found[name] = {**found.get(name, {}), **table} if isinstance(table, dict) else table
    return found


def rows(path: Path, count: int, seed: int) -> Path:
    """Prompts with completions, some longer than 64 tokens, and one torn line."""
    lines = [
        json.dumps(
            {"prompt": "ab cd " * (1 + (7 * number + seed) % 9), "completion": f"ef {number} gh" * (1 + number % 3)}
        )
        for number in range(count)
    ]
    path.write_text("\n".join([*lines, '{"prompt": "torn']) + "\n")
    return path


def make_branches(folder: Path) -> dict[str, Branch]:
    """Write the files of all branches into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "model", "llama", tie_word_embeddings=False)
    main = {"name": "main", "path": str(rows(folder / "main.jsonl", 12, 0))}
    text = {"name": "text", "path": str(folder / "text.txt"), "format": "text"}
    (folder / "text.txt").write_text("one two three " * 12 + "\n\n" + "four five " * 3)
    held = {"name": "held", "path": str(rows(folder / "held.jsonl", 4, 3))}
    apart = {"name": "apart", "path": str(rows(folder / "apart.jsonl", 3, 5))}
    words = ("nonsense", "**.layers.0.**", str(held["path"]))
    cheap = (observe.surroundings, observe.plan, observe.steps, observe.weights)
    single = (*cheap, observe.checks, observe.train, observe.score, observe.chat, observe.tasks)
    ranks = (*cheap[:3], observe.train_in_ranks, observe.score, observe.tasks)
    lora = merged(
        RECIPE,
        {"model": {"id": str(model)}, "data": {"sources": [main, text], "validation": [held]}},
        {"evaluate": {"sources": [apart]}},
    )
    full = merged(lora, {"method": {"kind": "full"}})
    del full["method"]["rank"]
    plain = {**lora, "method": {"kind": "lora"}}
    two = {"device": {**PROFILE["device"], "count": 2}}
    found: dict[str, Branch] = {}

    def add(name: str, recipe: dict[str, Any], observations: Any = single, profile: Any = PROFILE, **rest: Any) -> None:
        own, recipe_file = write(folder, name, recipe, profile)
        found[name] = Branch(name, own, recipe_file, words, observations, **rest)

    add("lora", lora)
    add("full", full)
    add("continued", merged(plain, {"model": {"adapter": str(_adapter(found["lora"], folder, model))}}))
    pair = [{"name": "one"}, {"name": "two", "from": "one", "train": {"learning_rate": 0.01}}]
    add("staged", {**lora, "stages": pair})
    pairs = {"name": "main", "path": str(write_pairs(folder / "pairs.jsonl", count=12, longest=12))}
    held_pairs = {"name": "held", "path": str(write_pairs(folder / "held-pairs.jsonl", count=4, longest=12, seed=1))}
    judged = {"sources": [pairs], "validation": [held_pairs]}
    quiet = {"eval": {"samples": 0}, "evaluate": {"log_samples": 0, "sources": [{**held_pairs, "name": "apart"}]}}
    add("preference", merged(lora, {"method": {"objective": "dpo"}, "data": judged}, quiet))
    boxes = detection_source(write_boxes(folder / "boxes", count=6))
    seen = {"sources": [boxes], "validation": [{**boxes, "name": "held"}], "max_length": 256}
    vision = {"model": {"id": str(write_qwen2_vl(folder / "vlm"))}, "data": seen}
    add("vision", merged(full, vision, {"evaluate": {"sources": [{**boxes, "name": "apart"}]}}))
    mixture = str(write_model(folder / "mixture", "mixtral"))
    add("mixture", merged(lora, {"model": {"id": mixture}}))
    add("replicated", lora, ranks, {**two, "parallel": {"strategy": "replicated"}})
    add("sharded", full, ranks, {**two, "parallel": {"strategy": "sharded"}})
    add("sequence", lora, ranks, {**two, "parallel": {"strategy": "replicated", "sequence": 2}})
    add("resumed", lora, (observe.surroundings, observe.score, observe.tasks), resumed=_finished(found["lora"], folder))
    add("evaluated", lora, (observe.score, observe.tasks), scored=True, others=())
    add("chatted", lora, (observe.chat, *cheap, observe.train))
    return found


def _finished(branch: Branch, folder: Path) -> Path:
    """A run of two steps that is done."""
    spec = resolve(str(branch.profile), str(branch.recipe), ["train.max_steps=2"]).spec
    place = create_run_directory(folder / "finished", spec.name, dump_run_spec(spec), {})
    assert run(place.path) == 0, (place.path / "engine.log").read_text()
    return place.path


def _adapter(branch: Branch, folder: Path, model: Path) -> Path:
    """An adapter that a run on the same base made."""
    adapter = folder / "adapter"
    shutil.copytree(_finished(branch, folder / "first") / "adapter", adapter)
    name_base(adapter, model)
    return adapter


def resumed_to_the_end(place: RunDirectory) -> Seen:
    """What a resumed run leaves."""
    load_run_spec(place.run_toml, own=True)
    run(place.path, resume=True)
    finish_run(place.path)
    return observe.seen_of(place)
