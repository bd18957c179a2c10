"""Reads a model's config, and explains what transformers or the hub cannot load."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of httpx or httpx2, by version
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging

from engine.architecture.classes import no_class
from engine.architecture.families import own_code
from engine.architecture.lookup import builtin_config, with_added_tokens
from engine.architecture.support import refuse_unsafe_packing
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.run import RunSpec
from engine.data.hub_connection import ask_hub
from engine.device.oom import classify
from engine.errors import EnvironmentProblem, TunedeckError, UsageError
from engine.model.reference import StartingWeights, find_starting_weights


def disable_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


def silence_libraries() -> None:
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)


HUB_ERRORS = (OSError, ValueError, ImportError, KeyError, HTTPError, SafetensorError)
"""What transformers raises for missing files, bad configs or network errors."""

DAMAGE_ERRORS = (
    *HUB_ERRORS, AttributeError, TypeError, ArithmeticError, LookupError, RuntimeError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises for a config.json with values of other kinds, out of range, or nested too deeply, besides
HUB_ERRORS."""

OWN_CODE_ERRORS = (AttributeError, TypeError, NameError, LookupError, RuntimeError, AssertionError)
"""What code written for another version of transformers raises, besides HUB_ERRORS."""

OFFLINE_SIGNS = (
    "couldn't connect",
    "cannot find the requested files in the local cache",
    "cannot find the requested files in the disk cache",
    "offline mode",
    "outgoing traffic has been disabled",
    "connection error",
    "max retries exceeded",
    "name resolution",
)


def require_reachable(model: str, what: str, revision: str | None) -> None:
    """Raise EnvironmentProblem if `model` is neither a folder nor cached at `revision`, and the hub does not answer
    (`what`: "tokenizer", for the message). Asked once: transformers' retries take most of a minute. Does nothing with
    HF_HUB_OFFLINE."""
    if Path(model).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
        ask_hub()
    except HFValidationError:
        return  # not a hub id, for which transformers has a better message
    except HTTPError as error:
        raise loading_error(error, model, what) from error


def loading_error(error: BaseException, model: str, what: str = "model") -> TunedeckError:
    """The error to show for `error`, raised while loading the `what` of `model`: EnvironmentProblem if the hub cannot
    be reached or refuses, else UsageError."""
    texts = " ".join(str(link) for link in _chain(error)).lower()
    first = _first_line(error)
    if Path(model).is_dir():
        return _about_folder(model, what, first, texts)
    if any(isinstance(link, GatedRepoError) for link in _chain(error)) or "gated repo" in texts:
        return EnvironmentProblem(
            f"{model} is gated: the hub gives it only to accounts that accepted its terms",
            fix=f"accept them at https://huggingface.co/{model}, then log in with: hf auth login",
        )
    if "trust_remote_code" in texts:
        return own_code(model)
    if _is_offline(error, texts):
        return EnvironmentProblem(
            f"cannot fetch the {what} of {model!r}: the hub is not reachable and it is not in the local cache",
            expected="a folder, a model in the cache, or a network connection",
            fix=f"download it on a machine with network access (hf download {model}) and set HF_HOME to that cache "
            "(HF_HUB_OFFLINE=1 skips the network), or set model.id to a folder",
        )
    if "401" in texts or "403" in texts or "not a valid model identifier" in texts or "repository not found" in texts:
        return EnvironmentProblem(
            f"the hub has no {model!r}, or it is private",
            expected="OWNER/NAME as on huggingface.co, or an existing folder",
            fix="check the spelling of model.id; for a private model log in with: hf auth login",
        )
    return UsageError(f"cannot load the {what} of {model!r}: {first}", fix="check model.id and model.revision")


@contextmanager
def blaming_own_code(config: PreTrainedConfig, model: str) -> Iterator[None]:
    """Inside the block, an error of Python code that came with `model` becomes a UsageError: such code is often written
    for an older transformers. Errors of transformers' own models and out-of-memory errors pass unchanged."""
    try:
        yield
    except OWN_CODE_ERRORS as error:
        if not type(config).__module__.startswith("transformers_modules") or classify(error) is not None:
            raise
        raise UsageError(
            f"the Python code of {model} fails with transformers {transformers.__version__}: "
            f"{type(error).__name__}: {_first_line(error)}",
            expected="code written for this version of transformers",
            fix="choose a version that transformers supports itself, often published with -hf in its name",
        ) from error


def _about_folder(folder: str, what: str, first: str, texts: str) -> TunedeckError:
    if "trust_remote_code" in texts:
        return own_code(folder)
    if what == "tokenizer":
        return UsageError(
            f"no usable tokenizer in {folder}: {first}",
            expected="tokenizer.json or another tokenizer file next to the model",
            fix="set model.tokenizer to a folder or hub id that has one",
        )
    return UsageError(f"cannot load the {what} in {folder}: {first}", fix="check the folder named by model.id")


def _is_offline(error: BaseException, texts: str) -> bool:
    if any(isinstance(link, HfHubHTTPError) for link in _chain(error)):
        return False
    kinds = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, HTTPError)
    return any(isinstance(link, kinds) for link in _chain(error)) or any(sign in texts for sign in OFFLINE_SIGNS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


AUTO_CLASSES = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
)
"""The auto classes of models that are trained, with transformers' classes by class of config; the one that keeps all
weights of a config with several models first."""


def refuse_kernels(config: PreTrainedConfig) -> None:
    """Raise UsageError for a model config, or a part of one, whose attention is a kernel of the hub: transformers would
    download it, and run it as code."""
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        attention = getattr(part, "_attn_implementation", None)
        if isinstance(attention, str) and "/" in attention:
            raise UsageError(
                f"config.json: attn_implementation = {attention!r} is code from the hub, which is not run",
                expected="a model config without it: the recipe sets the attention",
                fix="remove attn_implementation from config.json",
            )


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that opens what `architectures` in config.json names, so that results are of the base's class.
    Where that names no class of these, such as in a shipped config, the one that keeps vision and audio encoders."""
    refuse_kernels(config)
    opening = [(auto, classes_in(mapping, config)) for auto, mapping in AUTO_CLASSES if type(config) in mapping]
    architectures = config.architectures or ()
    for auto, classes in opening:
        if any(each.__name__ in architectures for each in classes):
            return auto
    if opening:
        return opening[0][0]
    ways = getattr(config, "auto_map", None) or {}
    return next((auto for auto, _ in reversed(AUTO_CLASSES) if auto.__name__ in ways), AutoModelForCausalLM)


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that `auto_class` opens; None for a model with code of its own."""
    mapping = dict(AUTO_CLASSES)[auto_class(config)]
    return classes_in(mapping, config)[0] if type(config) in mapping else None


def classes_in(mapping: Any, config: PreTrainedConfig) -> tuple[Any, ...]:
    """The classes of an auto mapping of transformers for a config."""
    found = mapping[type(config)]
    return found if isinstance(found, tuple) else (found,)


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_files(model: str, revision: str | None) -> list[Path]:
    """The files of a model's image processor that are on this machine; `model`: a folder or hub id."""
    if not model or model.startswith(BUILTIN_PREFIX):
        return []
    if Path(model).is_dir():
        return [path for name in PROCESSOR_FILES if (path := Path(model, name)).is_file()]
    cached = (try_to_load_from_cache(model, name, revision=revision) for name in PROCESSOR_FILES)
    return [Path(path) for path in cached if isinstance(path, str)]


def layer_configs(text: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The config of each layer where layers differ in a key: transformers refuses to read such a key of `text` itself.
    Elsewhere `text`, for all layers."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def layer_config(text: PreTrainedConfig, layer: object) -> PreTrainedConfig:
    """The config of the layer numbered `layer.layer_idx`, where layers have configs of their own; else `text`."""
    each, place = layer_configs(text), getattr(layer, "layer_idx", None)
    return each[place] if isinstance(place, int) and place < len(each) else each[0]


def model_config_dict(spec: RunSpec) -> dict[str, Any]:
    """The base model's config.json (for an earlier run, its base's) with the rows of added tokens, without the recipe's
    rotary scaling."""
    start = find_starting_weights(spec.recipe.model)
    if start.base.startswith(BUILTIN_PREFIX):
        return with_added_tokens(builtin_config(start.base), spec.recipe.model)
    return with_added_tokens(load_config(start, spec.limits.trust_remote_code).to_dict(), spec.recipe.model)


def check_packing(spec: RunSpec) -> None:
    """Raise UsageError if the recipe packs documents that the model would not keep apart."""
    if spec.recipe.data.packing:
        refuse_unsafe_packing(model_config_dict(spec), spec.recipe)


def load_config(start: StartingWeights, trust_remote_code: bool) -> PreTrainedConfig:
    """Load the config of the model that a run starts from; for an adapter trained with scaled rotary positions, the
    config saved beside it, which contains the scaling.

    UsageError: no config.json, or not a causal language model. EnvironmentProblem: the hub cannot be reached, or
    refuses.
    """
    if start.base.startswith(BUILTIN_PREFIX):
        facts = builtin_config(start.base)
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    _expect_config_file(start)
    if start.adapter is not None and Path(start.adapter, "config.json").is_file():
        start = replace(start, base=start.adapter, revision=None)
    require_reachable(start.base, "model", start.revision)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            start.base, revision=start.revision or "main", trust_remote_code=trust_remote_code
        )
    except DAMAGE_ERRORS as error:
        raise loading_error(error, start.base) from error
    if not isinstance(config.architectures, list | tuple | None):
        raise UsageError(
            f"config.json of {start.base}: architectures is not a list", expected="names of classes", fix="correct it"
        )
    if model_class(config) is None and not getattr(config, "auto_map", None):
        raise no_class(start.base, config.model_type)
    return config


def _expect_config_file(start: StartingWeights) -> None:
    if start.folder is not None and not (start.folder / "config.json").is_file():
        raise UsageError(
            f"no config.json in {start.folder}",
            expected="a model folder as written by save_pretrained",
            fix="set model.id to the folder with config.json and the safetensors files",
        )
