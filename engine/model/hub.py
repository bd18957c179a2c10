"""Creates errors, each with a fix, for models that transformers or the hub cannot load.

Loading itself is in `engine.model.load` and `engine.model.tokenizer`.

Try: `HF_HUB_OFFLINE=1 tunedeck train -p 24gb -r lora --set model.id=no/such-model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of httpx or httpx2, by version
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from engine.budget.architecture.trainable_families import own_code
from engine.data.hub_connection import ask_hub
from engine.device.oom import classify
from engine.errors import EnvironmentProblem, TunedeckError, UsageError

HUB_ERRORS = (OSError, ValueError, ImportError, KeyError, HTTPError, SafetensorError)
"""Exceptions that loading a model with transformers raises for missing files, bad configs or network errors."""

OWN_CODE_ERRORS = (AttributeError, TypeError, NameError, LookupError, RuntimeError, AssertionError)
"""Exceptions of code that was written for another version of transformers, beside HUB_ERRORS."""

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
    """Raise EnvironmentProblem if `model` (hub id or folder) is neither a folder nor in the cache at `revision`, and
    the hub does not answer. `what` names in the message what is loaded, such as "tokenizer". Does nothing with
    HF_HUB_OFFLINE.

    The hub is asked once, because without a network transformers' retries take most of a minute.
    """
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
    """Return the error to show for `error`, with a fix: EnvironmentProblem if the hub cannot be reached or refuses
    access, else UsageError. `error` was raised while loading the `what` (such as "tokenizer") of `model` (hub id or
    folder)."""
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
            fix=f"download it where there is a network (hf download {model}) and set HF_HOME to that cache "
            "(HF_HUB_OFFLINE=1 skips the network), or set model.id to a folder",
        )
    if "401" in texts or "403" in texts or "not a valid model identifier" in texts or "repository not found" in texts:
        return EnvironmentProblem(
            f"the hub has no {model!r}, or keeps it private",
            expected="OWNER/NAME as on huggingface.co, or an existing folder",
            fix="check the spelling of model.id; for a private model log in with: hf auth login",
        )
    return UsageError(f"cannot load the {what} of {model!r}: {first}", fix="check model.id and model.revision")


@contextmanager
def blaming_own_code(config: PreTrainedConfig, model: str) -> Iterator[None]:
    """Inside the block, an error raised by Python code that came with `model` becomes a UsageError that says so.

    Such code is often written for an older transformers. Errors of transformers' own models and out-of-memory errors
    pass unchanged.
    """
    try:
        yield
    except OWN_CODE_ERRORS as error:
        if not type(config).__module__.startswith("transformers_modules") or classify(error) is not None:
            raise
        raise UsageError(
            f"the Python code that comes with {model} fails with transformers {transformers.__version__}: "
            f"{type(error).__name__}: {_first_line(error)}",
            expected="code written for this version of transformers",
            fix="choose a model that transformers knows itself, often published with -hf in its name",
        ) from error


def _about_folder(folder: str, what: str, first: str, texts: str) -> TunedeckError:
    if "trust_remote_code" in texts:
        return own_code(folder)
    if what == "tokenizer":
        return UsageError(
            f"no usable tokenizer in {folder}: {first}",
            expected="tokenizer.json or another tokenizer file beside the model",
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
