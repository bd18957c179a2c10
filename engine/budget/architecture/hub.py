"""Fetches the config of a model that is neither on this machine nor shipped, and compares it with the model's weights.

The config goes into huggingface_hub's own cache, where `engine.budget.architecture.lookup` finds it from then on. Of
the weights only the file headers are read. Only commands fetch: a screen that plans while someone types must not wait
for the network.

Try: `tunedeck plan -p 24gb -r lora --set model.id=OWNER/NAME`
"""

from __future__ import annotations

from engine.budget.architecture.facts import from_config
from engine.budget.architecture.lookup import find_config, start_of
from engine.budget.architecture.parameters import parameter_count
from engine.errors import ConfigNotHereError, EnvironmentProblem, TunedeckError, UnknownArchitectureError, UsageError
from engine.spec.schema.run import RunSpec

ANSWER_SECONDS = 10.0
"""How long the hub may take for its first answer."""
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes per value of a safetensors dtype; 1 for all others."""


def bring_config(spec: RunSpec) -> list[str]:
    """Make sure that the config of a run's model is on this machine; returns notices about what was fetched.

    Raises:
        ConfigNotHereError: the hub cannot be reached.
        EnvironmentProblem: the hub has no such model, refuses access to it, or answers with another error.
        UsageError: model.id is not a valid name, or the model has no config.json or no such revision.
    """
    try:
        find_config(spec.recipe.model.id, spec.recipe.model.revision)
        return []
    except ConfigNotHereError as missing:
        model, revision = start_of(spec.recipe.model.id, spec.recipe.model.revision)
        _fetch(model, revision, missing)
    return _compared(model, revision)


def _fetch(model: str, revision: str | None, missing: ConfigNotHereError) -> None:
    """Download config.json into the hub cache; raises `missing` if the hub cannot be reached. A plain request is sent
    first, because it fails at once without a connection, while the hub's client retries for half a minute."""
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
            f"{model!r} is no name of a model", expected="OWNER/NAME as on the hub, or a folder", fix="check model.id"
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
            f"the hub has no {model!r}, or keeps it private",
            expected="OWNER/NAME as on the hub, or an existing folder",
            fix="check the spelling of model.id; for a private model log in with: hf auth login",
        )
    if isinstance(answer, EntryNotFoundError):
        return UsageError(f"{model} on the hub has no config.json", fix="choose a model in transformers' layout")
    status = answer.response.status_code
    if status == 404:
        return UsageError(f"the hub has {model}, but not this revision", fix="check model.revision")
    return EnvironmentProblem(f"the hub answers {status} for {model}", fix="try again later, or use a local folder")


def _compared(model: str, revision: str | None) -> list[str]:
    """Compare the headers of the weight files with the config; return a notice if they differ or cannot be compared."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # huggingface_hub re-exports these names lazily
        HTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        counts = get_safetensors_metadata(model, revision=revision, timeout=ANSWER_SECONDS).parameter_count
    except NotASafetensorsRepoError:
        return [f"{model} has no safetensors files on the hub, and no other format is opened: training will refuse it"]
    except (HTTPError, SafetensorsParsingError) as error:
        return [f"the weights of {model} could not be looked at ({error}); the plan follows its config alone"]
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
        f"the weights of {model} are {stored:,} parameters, {size_gib:.2f} GiB as stored; by its config the plan "
        f"counts {expected:,}: quantised weights, or parts that training does not load"
    ]
