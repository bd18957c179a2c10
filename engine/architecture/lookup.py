"""Where the config of a model is found: built in, a local folder, this machine's hub cache, shipped with Tunedeck, or
the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomli

from engine.architecture.assembled import (
    ASSEMBLED_PREFIX,
    assembled_config,
    parse_assembled,
    problems_of_experts,
)
from engine.architecture.continued import require_closed_form
from engine.architecture.facts import Architecture, from_config
from engine.architecture.model_folder import refuse_without_config
from engine.architecture.parameters import parameter_count
from engine.architecture.token_rows import rows_with, with_rows
from engine.config.files.caches import find_snapshot
from engine.config.files.find import BUILTIN_PREFIX, RUN_PREFIX, split_run_reference
from engine.config.load import load_run_spec
from engine.config.schema.recipe import Model, RopeScaling
from engine.config.schema.run import RunSpec
from engine.errors import (
    ConfigNotHereError,
    EnvironmentProblem,
    SpecError,
    TunedeckError,
    UnknownArchitectureError,
    UsageError,
)
from engine.journal.index import resolve_run
from engine.journal.stages import result_run


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a model's config.json says, found once for a plan or a start and handed to every check."""

    config: Mapping[str, Any] | None
    """The parsed config.json; None if there is none on this machine."""
    architecture: Architecture | None
    """None without a config, and for a family without a memory formula."""
    reason: TunedeckError | None = None
    """Why there is no architecture: ConfigNotHereError, UnknownArchitectureError, or what is wrong with the model."""
    scaling: RopeScaling | None = None
    """The rotary scaling of the run that the model is the result of; not part of `config`."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], scaling: RopeScaling | None = None) -> ModelFacts:
        """The facts that follow from a config."""
        try:
            return cls(config, from_config(config), scaling=scaling)
        except UsageError as error:  # UnknownArchitectureError, or contradictions in the config
            return cls(config, None, error, scaling)

    def require_architecture(self) -> Architecture:
        """The architecture. Raises `reason` where there is none."""
        if self.architecture is None:
            assert self.reason is not None
            raise self.reason
        return self.architecture

    def require_config(self) -> Mapping[str, Any]:
        """The config. Raises `reason` where there is none."""
        if self.config is None:
            assert self.reason is not None
            raise self.reason
        return self.config


def find_facts(model: Model) -> ModelFacts:
    """The facts of the model that a recipe names, from what is on this machine. Raises nothing: see
    `ModelFacts.reason`."""
    try:
        config = with_added_tokens(find_config(model.id, model.revision), model)
        facts = ModelFacts.of_config(config, scaling_of(model.id))
        return facts if facts.architecture is None else _with_adapter(facts, facts.architecture, model)
    except TunedeckError as error:
        return ModelFacts(None, None, error)


def _with_adapter(facts: ModelFacts, arch: Architecture, model: Model) -> ModelFacts:
    """`facts`, without the architecture if the adapter that is continued has no memory formula."""
    try:
        require_closed_form(model, arch)
    except UnknownArchitectureError as error:
        return replace(facts, architecture=None, reason=error)
    return facts


def find_architecture(spec: RunSpec) -> Architecture:
    """Raises ConfigNotHereError when no config is on this machine, UnknownArchitectureError for a family, or an adapter
    to continue, without a memory formula, UsageError for a missing folder."""
    arch = _architecture_of(spec.recipe.model)
    require_closed_form(spec.recipe.model, arch)
    return arch


def _architecture_of(start: Model) -> Architecture:
    model, revision = start_of(start.id, start.revision)
    if added_tokens(start):
        return from_config(with_added_tokens(find_config(model, revision), start))
    if model.startswith(ASSEMBLED_PREFIX):
        return from_config(find_config(model, revision))
    file = _config_file(model, revision)
    return _shipped_architecture(model) if file is None else from_config(_read_json(file))


def find_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The parsed config.json of a built-in, local, cached or shipped model. Raises ConfigNotHereError when there is
    none on this machine, UsageError for a folder that does not exist."""
    model, revision = start_of(model, revision)
    if model.startswith(ASSEMBLED_PREFIX):
        experts, per_token, dense = parse_assembled(model)
        return _assembled(find_config(dense, revision), experts, per_token)
    file = _config_file(model, revision)
    return _shipped_config(model) if file is None else _read_json(file)


def _assembled(dense: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """The mixture's config before it is assembled. Raises UsageError if it cannot be."""
    problems = problems_of_experts(["the recipe's model"], [dense])
    if problems:
        raise UsageError(
            "a mixture of experts cannot be assembled: " + "; ".join(problems), fix="choose another model.id"
        )
    return assembled_config(dense, experts, per_token)


def _config_file(model: str, revision: str | None) -> Path | None:
    """The file in the model's folder, where it may be missing, or in the hub cache; None if built in or not cached.
    Raises UsageError if a model folder does not exist."""
    if model.startswith(BUILTIN_PREFIX):
        return None
    local = os.path.expanduser(model) if model.startswith("~") else model
    if os.path.isdir(local):
        refuse_without_config(Path(local))
        return Path(local, "config.json")
    if os.path.isfile(local):
        raise UsageError(
            f"model.id = {model!r} is a file",
            expected="a model's folder or hub id",
            fix=f"data belongs in a source: --set data.sources.0.path={model}, not model.id",
        )
    if os.path.isabs(local) or model.startswith("."):
        raise UsageError(f"the model folder {model} does not exist", fix="check model.id")
    return _cached_config(model, revision)


def _shipped_config(model: str) -> dict[str, Any]:
    if model.startswith(BUILTIN_PREFIX):
        return builtin_config(model)
    shipped = _shipped_entry(model.lower())
    if shipped is not None:
        return dict(shipped["config"])
    raise ConfigNotHereError(
        f"no config.json of {model!r} on this machine",
        expected="a folder with a config.json, a model in the hub cache, or one of the shipped profiles/models",
        fix=f"download it once: hf download {model} config.json",
    )


@lru_cache(maxsize=64)
def _shipped_architecture(model: str) -> Architecture:
    """Cached, because shipped entries do not change while a process runs."""
    return from_config(_shipped_config(model))


def start_of(model: str, revision: str | None) -> tuple[str, str | None]:
    """Resolve "run:RUN" to (model, revision) at the start of its chain of runs, which has the same shapes: a mixture,
    if a run of the chain assembled one. Other names are returned unchanged."""
    for start in _starts(model):
        model, revision = start.id, start.revision
    return model, revision


def scaling_of(model: str) -> RopeScaling | None:
    """The rotary scaling that "run:RUN" was trained with, its own or that of the run it started from; None for other
    names. Raises UsageError if there is no such run."""
    return next((start.rope_scaling for start in _starts(model) if start.rope_scaling is not None), None)


def added_tokens(model: Model) -> list[str]:
    """The tokens of `add_tokens`, with those of the runs that the model or its adapter goes on from. UsageError: there
    is no such run."""
    chain = [model]
    for start in (model.id, model.adapter or ""):
        with suppress(SpecError):  # a plan refuses a run.toml that is damaged; weights can be continued without it
            chain += _starts(start)
    return list(dict.fromkeys(token for each in chain for token in each.add_tokens))


def with_added_tokens(config: dict[str, Any], model: Model) -> dict[str, Any]:
    """The config of a model once its embedding has the added tokens. Raises UsageError if there is no such run."""
    wanted = added_tokens(model)
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) and "vocab_size" in text else config).get("vocab_size")
    if not wanted or not isinstance(rows, int):
        return config
    chain = [model, *_starts(model.id)]
    tokenizer = next((each.tokenizer for each in chain if each.tokenizer is not None), chain[-1].id)
    return with_rows(config, rows_with(set(wanted), rows, tokenizer, chain[-1].revision))


def continues_adapter(model: Model) -> bool:
    """Whether a run without stages trains an adapter further: its own, or that of the run that "run:RUN" names. Raises
    UsageError if there is no such run."""
    if model.adapter is not None or not model.id.startswith(RUN_PREFIX):
        return model.adapter is not None
    run = result_run(resolve_run(split_run_reference(model.id)[0], None))
    return not run.assembly.is_file() and load_run_spec(run.run_toml).recipe.method.kind == "lora"


def _starts(model: str) -> Iterator[Model]:
    """The [model] of the run that "run:RUN" names, then of the run which that started from, and so on; a stage that
    assembled a mixture ends with the mixture's folder. Nothing for other names. Raises UsageError if there is no such
    run."""
    while model.startswith(RUN_PREFIX):
        run = result_run(resolve_run(split_run_reference(model)[0], None))
        assembled = run.assembly.is_file()
        start = Model(id=str(run.model)) if assembled else load_run_spec(run.run_toml).recipe.model
        yield start
        model = start.id


def builtin_config(name: str) -> dict[str, Any]:
    """Read profiles/models/builtin-NAME.toml. Raises UsageError if there is none."""
    entry = _shipped_entry(name) if name.startswith(BUILTIN_PREFIX) else None
    if entry is None:
        ids = sorted(str(model) for entry in shipped_entries() for model in entry["ids"])
        known = ", ".join(model for model in ids if model.startswith(BUILTIN_PREFIX))
        raise UsageError(f"no built-in model {name!r}", expected=known, fix="set model.id to one of them")
    return dict(entry["config"])


@lru_cache(maxsize=64)
def _shipped_entry(model: str) -> dict[str, Any] | None:
    """The file in profiles/models that has the id, in lower case. Only files in which it occurs are parsed: parsing all
    of them took as long as a plan."""
    for text in _shipped_texts():
        if model in text.lower():
            entry = tomli.loads(text)
            if model in [str(name).lower() for name in entry["ids"]]:
                return entry
    return None


def shipped_entries() -> Iterator[dict[str, Any]]:
    """The content of each file in profiles/models: `ids`, `source`, `parameters`, and the table `config`."""
    yield from map(tomli.loads, _shipped_texts())


def _shipped_texts() -> Iterator[str]:
    """The texts in the order of file names; built-in models come first."""
    yield from map(_text_of, _shipped_files())


@cache
def _shipped_files() -> list[Path]:
    return sorted(Path(str(resources.files("profiles"))).glob("models/*.toml"))


@cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _cached_config(model: str, revision: str | None) -> Path | None:
    """None if absent in the hub cache."""
    snapshot = find_snapshot(model, revision)
    config = snapshot / "config.json" if snapshot is not None else None
    return config if config is not None and config.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    """Raises UsageError when the file is absent or not JSON."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_hook=_or_float)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            expected="the model's config.json",
            fix="check the folder named by model.id",
        ) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} does not hold a JSON object", fix="check the folder named by model.id")
    return loaded


def _or_float(found: dict[str, Any]) -> Any:
    """transformers writes infinity and NaN as {"__float__": "Infinity"}, in the time steps of state-space models."""
    number = found.get("__float__")
    return float(number) if len(found) == 1 and number in ("Infinity", "-Infinity", "NaN") else found


ANSWER_SECONDS = 10.0
"""How long the hub may take for its first answer."""
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes per value of a safetensors dtype; 1 for all others."""


def bring_config(spec: RunSpec) -> list[str]:
    """Make sure that the config of a run's model is on this machine; returns notices about what was fetched. Not for a
    screen that plans while someone types: that must not wait for the network.

    Raises ConfigNotHereError (hub unreachable), EnvironmentProblem (no such model, access refused, another error) or
    UsageError (invalid model.id, no config.json, no safetensors files, no such revision).
    """
    try:
        find_config(spec.recipe.model.id, spec.recipe.model.revision)
        return []
    except ConfigNotHereError as missing:
        model, revision = start_of(spec.recipe.model.id, spec.recipe.model.revision)
        _fetch(model, revision, missing)
    return _compared(model, revision, random=spec.recipe.model.init == "random")


def _fetch(model: str, revision: str | None, missing: ConfigNotHereError) -> None:
    """Raises `missing` if the hub cannot be reached. A plain request is sent first, because it fails at once without a
    connection, while the hub's client retries for half a minute."""
    # Imported here because it takes a tenth of a second. HTTPError is the base error of the hub's HTTP client.
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # huggingface_hub re-exports these names lazily
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # re-exported lazily

    disable_progress_bars()
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        hf_hub_download(model, "config.json", revision=revision, etag_timeout=ANSWER_SECONDS)
    except HFValidationError:
        raise UsageError(
            f"{model!r} is not a valid model name",
            expected="OWNER/NAME as on the hub, or a folder",
            fix="check model.id",
        ) from None
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _refused(error, model) or missing from error


def _refused(error: BaseException, model: str) -> TunedeckError | None:
    """The error to raise if the hub answered and refused; None if it did not answer."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    answer = next((link for link in (error, error.__cause__) if isinstance(link, HfHubHTTPError)), None)
    if answer is None:
        return None
    if isinstance(answer, GatedRepoError):
        return EnvironmentProblem(
            f"{model} is gated: the hub gives it only to accounts that accepted its terms",
            fix=f"accept them at https://huggingface.co/{model}, then log in with: hf auth login",
        )
    if isinstance(answer, RepositoryNotFoundError):
        return EnvironmentProblem(
            f"the hub has no {model!r}, or it is private",
            expected="OWNER/NAME as on the hub, or an existing folder",
            fix="check the spelling of model.id; for a private model log in with: hf auth login",
        )
    if isinstance(answer, EntryNotFoundError):
        return UsageError(f"{model} on the hub has no config.json", fix="choose a model in the format of transformers")
    status = answer.response.status_code
    if status == 404:
        return UsageError(f"the hub has {model}, but not this revision", fix="check model.revision")
    return EnvironmentProblem(f"the hub returned {status} for {model}", fix="try again later, or use a local folder")


def _compared(model: str, revision: str | None, *, random: bool) -> list[str]:
    """A notice if the headers of the weight files differ from the config, or cannot be compared. Raises UsageError if
    there are none, unless the weights are to be `random`."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # huggingface_hub re-exports these names lazily
        HTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        counts = get_safetensors_metadata(model, revision=revision, timeout=ANSWER_SECONDS).parameter_count
    except NotASafetensorsRepoError:
        if random:
            return []
        raise UsageError(
            f"{model} has no safetensors files on the hub, and other formats are not supported",
            expected="weights as *.safetensors",
            fix="set model.id to the safetensors version of the model; for a GGUF file, to the model it was made from",
        ) from None
    except (HTTPError, SafetensorsParsingError) as error:
        return [f"the weights of {model} could not be checked ({error}); the plan uses only its config"]
    stored = sum(counts.values())
    size_gib = sum(BYTES.get(dtype, 1) * count for dtype, count in counts.items()) / 2**30
    try:
        arch = from_config(find_config(model, revision))
    except UnknownArchitectureError:
        return [f"the weights of {model} are {stored:,} parameters, {size_gib:.2f} GiB as stored"]
    expected = parameter_count(arch)
    # A tied head may be stored once or twice.
    if stored in (expected, expected + arch.vocab * arch.hidden):
        return []
    return [
        f"the weights of {model} are {stored:,} parameters, {size_gib:.2f} GiB as stored; the plan counts "
        f"{expected:,} from its config: the weights are quantised, or have parts that training does not load"
    ]
