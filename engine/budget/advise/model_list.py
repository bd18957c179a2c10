"""Which known models the shipped profiles train: by what method, at what length and speed, as plans say.

Every answer is that of `make_plan` for a shipped recipe with another `model.id`. Answers are kept on disk under a hash
of all that decides them. Nothing here starts a simulation.

Try: `tunedeck models qwen3`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.architecture.lookup import ModelFacts, shipped_entries
from engine.architecture.positions import positions_of
from engine.budget.advise.model_rules import refuse_with_model
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import Plan, find_predictor, make_plan
from engine.budget.advise.staged_plan import find_run_facts
from engine.budget.calibration import calibration_file
from engine.budget.predict.pace import pace_file
from engine.config.changes import with_changes
from engine.config.check.notes import refuse_unsupported
from engine.config.files.caches import cache_folder
from engine.config.files.document import read_document
from engine.config.files.find import BUILTIN_PREFIX, SHIPPED_FOLDER, SpecFile, list_spec_files
from engine.config.files.machine import installed
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, SpecError, TunedeckError
from engine.journal.files import write_atomically

FORMAT = 1
"""Version of the kept answers."""
RECIPES = {"LoRA": "lora", "4-bit LoRA": "qlora", "full": "full"}
"""The shipped recipe of each method."""
PACKAGES = ("tunedeck", "torch", "transformers", "peft", "liger-kernel")
"""Their versions decide what is planned."""
NOT_SIMULATED = "not_simulated"
UNSTATED_POSITIONS = 131072
"""What is looked at where a config gives no limit: Gemma 3 (its own default), recurrent models."""
WEIGHT = GRADIENT = 2
"""Bytes, in 16 bits."""
OFFLOADS = ("train.activation_offload", "train.optimizer_offload")


@dataclass(frozen=True)
class Answer:
    """What a plan says of one model, method and profile."""

    method: str
    recipe: str
    profile: str
    trains: bool
    length: int | None = None
    """Tokens of the sequences that the plan and the speed are for: the recipe's data.max_length."""
    longest: int | None = None
    """The largest power of two, in tokens, of a sequence that fits, up to the model's positions; None: not known."""
    micro_batch: int | None = None
    tokens_per_second: float | None = None
    """Of all devices; None where nothing is known of it: several devices, optimizer state on the host, a simulation."""
    settings: dict[str, Any] | None = None
    """By recipe key: what the plan adds to make it fit, beside a smaller micro-batch."""
    peak_bytes: int | None = None
    """Of one device."""
    predictor: str | None = None
    """"closed_form" or "simulated"; None: no plan."""
    reason: str | None = None
    """Why there is no plan; NOT_SIMULATED: `engine.launch.other_processes` has to make a simulation first."""

    @property
    def offloads(self) -> bool:
        return bool(set(OFFLOADS) & set(self.settings or {}))


@dataclass(frozen=True)
class ListedModel:
    """A file of profiles/models, and what the profiles say of it."""

    name: str
    """The file's stem."""
    ids: list[str]
    """Hub ids of models of these shapes."""
    parameters: int
    answers: list[Answer]
    """By method, then by profile in the order asked for."""

    def best(self, method: str) -> Answer | None:
        """The first profile that trains it, if one does without offloads among those; None if none does."""
        able = [answer for answer in self.answers if answer.method == method and answer.trains]
        return next((answer for answer in able if not answer.offloads), able[0] if able else None)


def shipped_gpus() -> list[SpecFile]:
    """The shipped profiles of CUDA devices, the one with least memory first."""
    found = []
    for file in list_spec_files("profile", SHIPPED_FOLDER):  # a folder without ./profiles: no file of the user's
        device = read_document(file.path).data.get("device", {})
        if file.path.is_relative_to(SHIPPED_FOLDER) and device.get("kind") == "cuda":
            found.append((device.get("count", 1) * device["memory_gib"], file))
    return [file for _, file in sorted(found, key=lambda row: row[0])]


def known_models(word: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(name, content) of the files in profiles/models with `word` in a hub id or the name, in any case."""
    return [
        (path.stem, entry)
        for path, entry in zip(sorted((SHIPPED_FOLDER / "models").glob("*.toml")), shipped_entries(), strict=True)
        if not entry["ids"][0].startswith(BUILTIN_PREFIX)
        and any(word.lower() in text.lower() for text in (path.stem, *entry["ids"]))
    ]


def list_model(
    name: str, entry: Mapping[str, Any], profiles: Sequence[SpecFile], *, every: bool = False, simulate: bool = False
) -> ListedModel:
    """The answers about one model, from disk where they are kept. Of each method, profiles behind the first that trains
    it without offloads are left out unless `every` is asked for. Raises NotSimulatedError with `simulate`."""
    path = cache_folder() / "models" / f"{_key(entry, profiles, every)}.json"
    answers = _kept(path)
    if answers is None or (simulate and any(answer.reason == NOT_SIMULATED for answer in answers)):
        answers = list(_answers(entry, profiles, every=every, simulate=simulate))
        with suppress(OSError):  # a full or read-only disk: they are computed again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps([asdict(answer) for answer in answers]))
    return ListedModel(name, entry["ids"], entry["parameters"], answers)


def _kept(path: Path) -> list[Answer] | None:
    try:
        return [Answer(**answer) for answer in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError):
        return None  # never written, or damaged


def _key(entry: Mapping[str, Any], profiles: Sequence[SpecFile], every: bool) -> str:
    files = [*(file.path for file in profiles), *map(_recipe, RECIPES.values()), calibration_file(), pace_file()]
    parts = [FORMAT, every, entry, [_text(file) for file in files], [installed(name) for name in PACKAGES], _code()]
    if ModelFacts.of_config(entry["config"]).architecture is None:  # what is simulated later is looked at
        parts.append(sorted(file.name for file in (cache_folder() / "simulations").glob("*.json")))
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """A hash of the code that plans."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.blake2b(digest_size=16)
    for room in ("budget", "config"):
        for file in sorted((root / room).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.is_file() else None


def _recipe(name: str) -> Path:
    return SHIPPED_FOLDER / "recipes" / f"{name}.toml"


def _answers(
    entry: Mapping[str, Any], profiles: Sequence[SpecFile], *, every: bool, simulate: bool
) -> Iterator[Answer]:
    for method, recipe in RECIPES.items():
        for profile in profiles:
            blank = Answer(method, recipe, profile.name, trains=False)
            try:
                spec = resolve(str(profile.path), str(_recipe(recipe)), [f"model.id={entry['ids'][0]}"]).spec
                answer = _answer(blank, spec)
            except NotSimulatedError as missing:
                reason = _not_worth_simulating(missing.spec, entry["parameters"])
                if simulate and not reason:
                    raise
                answer = replace(blank, reason=reason or NOT_SIMULATED)
            except TunedeckError as error:
                answer = replace(blank, reason=_reason(error))
            yield answer
            if answer.trains and not answer.offloads and not every:
                break


def _reason(error: TunedeckError) -> str:
    """Without the place in a shipped file that `model.id` was put into."""
    if isinstance(error, SpecError):
        return "; ".join(problem.partition(": ")[2] for problem in error.problems)
    return error.found


def _not_worth_simulating(missing: object, parameters: int) -> str:
    """Why the answer is no without a simulation of `missing`, a variant of the run; empty if it has to be made."""
    assert isinstance(missing, RunSpec)
    least = parameters * (WEIGHT if missing.recipe.method.kind == "lora" else WEIGHT + GRADIENT)
    if least > missing.profile.device.capacity_bytes:
        return f"weights and their gradients alone are {least / 2**30:.0f} GiB"
    if missing.recipe.train.activation_offload or missing.recipe.train.optimizer_offload:
        return "does not fit without offloading, which is not simulated for this list"
    return ""


def _answer(blank: Answer, asked: RunSpec) -> Answer:
    of_run = find_run_facts(asked)
    spec, facts = settle_parallel(asked, of_run).spec, of_run.of(asked.recipe.model)
    refuse_unsupported(spec)
    refuse_with_model(spec, facts)
    plan = make_plan(spec, facts=facts)
    added = {key: value for key, value in plan.remedies.items() if key != "train.micro_batch"}
    if added:
        spec = with_changes(spec, added)
        plan = make_plan(spec, facts=facts)
    trains = plan.verdict != "does_not_fit" and plan.host_fits
    timed = plan.time if trains and not spec.recipe.train.optimizer_offload else None
    return Answer(
        method=blank.method,
        recipe=blank.recipe,
        profile=blank.profile,
        trains=trains,
        length=plan.length,
        longest=_longest(spec, facts, plan) if trains else None,
        micro_batch=plan.micro_batch,
        tokens_per_second=timed.tokens_per_second if timed else None,
        settings=added,
        peak_bytes=plan.peak_bytes,
        predictor=plan.predictor,
    )


def _longest(spec: RunSpec, facts: ModelFacts, plan: Plan) -> int:
    """A sequence at a time, all layers recomputing; at least the planned length."""
    spec = with_changes(spec, {"train.gradient_checkpointing": True})
    predictor, length = find_predictor(spec, facts), plan.length
    limit = positions_of(facts.require_config()) or UNSTATED_POSITIONS
    while 2 * length <= limit and predictor.fits(1, 2 * length):
        if not predictor.host_fits(1, 2 * length):
            break
        length *= 2
    return length
