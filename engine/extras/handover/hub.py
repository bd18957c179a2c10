"""Sends a result to a repository of the Hugging Face hub: chooses the files, looks into each for what others must not
see, and uploads. What the hub has already is not sent again. A hub that does not answer is not waited for without end.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, set_client_factory
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of httpx or httpx2, by version
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory

from engine.architecture.model_folder import ADAPTER_CONFIG
from engine.config.files.secrets import secrets_in
from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem, UsageError
from engine.extras.handover.card import Facts, is_untouched, origin_of, write_card
from engine.extras.handover.prepare import Notify, Order, merged_model
from engine.extras.handover.result import Result, config_of, read_result
from engine.journal.checkpoints_on_disk import best_step, removed_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.files import MOST_BYTES, decode_json, read_table
from engine.journal.own_files import result_files
from engine.journal.summary import summarise
from engine.model.config import HUB_ERRORS, auto_class, silence_libraries
from engine.model.reference import BASE_FOLDER, find_run_weights

CARD = "README.md"
WEIGHTS = ("adapter_config.json", "adapter_model*", "model*.safetensors", "model.safetensors.index.json")
SENT = (
    *WEIGHTS, "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "chat_template.*",
    "additional_chat_templates/*.jinja", "*processor_config.json", "processor_config.json",
)  # fmt: skip
"""Globs on the files of a result that others need to open it; nothing else is sent."""

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model")
"""Files with a million words, among which a short path is a word like others."""

PATH = re.compile(r"(/|~/|[A-Za-z]:\\)[^\s]*[/\\]")
"""How a path of a machine begins, in a value of a config."""
PATH_INSIDE = re.compile(
    r"(?:(?<![\w.~:/<\\-])|(?<=\bfile:/)|(?<=\bfile://))~?/(?:[\w.@+-]+/)+[\w.@+-]*"
    r"|(?<!\w)[A-Za-z]:\\(?:[\w.@+ -]+\\)*[\w.@+-]+"
)
"""An absolute path of at least two parts anywhere in a value; no part of a web address or a name such as org/model."""
TEMPLATE = "chat_template"
"""Key whose value is a program, which may name paths of the tools that it describes: there, only those count that are
on this machine."""
NAME_KEYS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys that may name a folder where a hub id belongs; it is left out."""

LOG_IN = (
    "log in with a token that has write access: hf auth login (https://huggingface.co/settings/tokens), or set HF_TOKEN"
)
AGAIN = "repeat the command: files that were already uploaded are not sent again"

ANSWER_SECONDS, COMMIT_SECONDS = 30.0, 120.0
"""How long the hub may take nothing, or send nothing; it commits a large repository in a minute."""
MOST_TIMEOUTS = 3
"""Of one step of a push; the library would try six times."""
SENDING_SECONDS, SLOWEST_BYTES_PER_SECOND = 600.0, 100_000
"""After which a push ends in any case: so long, and a second for each 100 KB."""
LARGEST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as the format allows."""


@dataclass(frozen=True)
class Item:
    path: str
    """In the repository."""
    content: Path | bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(frozen=True)
class Place:
    """A repository as it is before sending."""

    repo: str
    exists: bool
    private: bool
    files: tuple[str, ...]
    commit: str | None


@dataclass(frozen=True)
class Parcel:
    """What is sent."""

    form: str
    """adapter, merged, or model (trained in full)."""
    items: list[Item]
    stale: list[str]
    """Files of the repository that are removed."""
    notes: list[str]

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def prepare_push(
    directory: RunDirectory, spec: RunSpec, repo: str, which: str | None, notify: Notify, *, public: bool,
    merged: bool, trust_remote_code: bool, merged_folder: Path | None = None, recorded: bool = True,
) -> tuple[HfApi, Place, Parcel]:  # fmt: skip
    """All that `send` needs; sends nothing. `merged_folder`: the result as the run itself merged it. `recorded`: the
    run's journal, which no other process writes, gets the account of what is merged. Raises the errors of `connect`,
    `look_at` and `pack`."""
    api, repo = connect(repo)  # before a merge, which takes minutes
    place = look_at(api, repo, public=public)
    silence_libraries()
    folder = find_run_weights(f"run:{directory.path}" + (f"@{which}" if which else "")).resolve()
    result = read_result(spec, folder, trust_remote_code=trust_remote_code)
    parcel = pack(
        api, place, result, spec, directory, which, notify, merged=merged, trust_remote_code=trust_remote_code,
        merged_folder=merged_folder, recorded=recorded,
    )  # fmt: skip
    return api, place, parcel


def pack(
    api: HfApi, place: Place, result: Result, spec: RunSpec, directory: RunDirectory, which: str | None,
    notify: Notify, *, merged: bool, trust_remote_code: bool, merged_folder: Path | None = None, recorded: bool = True,
) -> Parcel:  # fmt: skip
    """Merge where asked, choose the files, write the card. `which`: the checkpoint, or None for the run's result.
    Raises UsageError for an adapter that nobody else could open, and as `require_clean` and `merge` do."""
    form = "model" if result.base is None else "merged" if merged else "adapter"
    notes, folder, base = [], result.folder, result.base
    here = Path(base) if base is not None and Path(base).is_dir() else None
    if form == "adapter" and (folder / BASE_FOLDER).is_dir():
        raise UsageError(
            "the adapter's base was created by the run and exists only here, so others could not load the adapter",
            fix="add --merged",
        )
    if form == "adapter" and here is not None:
        notes.append("the adapter's base is a folder on this machine: others need a copy of it, or push --merged")
    if form == "merged" and merged_folder is not None:
        folder = merged_folder
    elif form == "merged":
        out = directory.path / "handover" / (f"checkpoint-{which}" if which else "")
        run = directory if recorded else None
        order = Order("push", out, merged=True, trust_remote_code=trust_remote_code, run=run)
        folder = merged_model(result, order, notify)
    items, origin = collect(folder, _place_of(folder, directory)), origin_of(spec.recipe.model)
    if has_card_of_others(api, place):
        notes.append(f"{CARD} was edited in the repository and is not overwritten")
    else:
        task = _task(str(folder) if form != "adapter" else str(base), result.revision, trust_remote_code)
        facts = Facts(
            place.repo, form, _step(directory, spec, which), origin, task, license_of(api, origin.hub_id)
        )  # fmt: skip
        if origin.hub_id and not facts.license:
            notes.append(f"the license of {origin.hub_id} is unknown, so the card does not state one")
        items.append(Item(CARD, write_card(result, spec, directory, facts).encode()))
    require_clean(items, [directory.path.resolve(), *([here.resolve()] if here is not None else [])])
    return Parcel(form, items, stale_weights(place, items), notes)


def _task(model: str, revision: str | None, trust_remote_code: bool) -> str:
    """The hub's name for what the model does; text alone if its config cannot be had."""
    config = config_of(model, None if Path(model).is_dir() else revision, trust_remote_code)
    images = config is not None and auto_class(config).__name__ == "AutoModelForImageTextToText"
    return "image-text-to-text" if images else "text-generation"


def _step(directory: RunDirectory, spec: RunSpec, which: str | None) -> int:
    """The step whose weights `which` names."""
    if which is not None and which != "best":
        return int(which)
    removed = removed_checkpoints(directory.checkpoints)
    best = best_step(directory.checkpoints) or (removed.best if removed is not None else None)
    if best is not None and (which == "best" or spec.recipe.checkpoint.result == "best"):
        return best
    return summarise(directory).step


def _place_of(folder: Path, directory: RunDirectory) -> Path:
    """Return the folder that files of a result in `folder` may not leave: that of the run, but of a result elsewhere
    its own."""
    return directory.path if folder.is_relative_to(directory.path) else folder


def collect(folder: Path, run: Path | None = None) -> list[Item]:
    """Return the files to send of a result, by name. Configs lose the folders of this machine. Raises UsageError as
    `result_files` does for links that leave the folder `run`, by default the result's own."""
    patterns: tuple[str, ...] = SENT
    config = folder / "config.json"
    if config.is_file() and read_table(config).get("auto_map"):
        patterns = (*SENT, "*.py")  # code that the model's own config loads
    files = result_files(folder, run or folder)
    named = [(path.relative_to(folder).as_posix(), path) for path in files]
    return [
        _without_folders(Item(name, path))
        for name, path in named
        if any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
    ]


def _is_config(name: str) -> bool:
    return name.endswith(".json") and not any(fnmatch(name, pattern) for pattern in VOCABULARIES)


def _without_folders(item: Item) -> Item:
    if not _is_config(item.path):
        return item
    document = _document(item.path, item.read())
    if not isinstance(document, dict):
        return item
    local = [key for key in NAME_KEYS if isinstance(document.get(key), str) and _is_local(document[key])]
    if not local:
        return item
    for key in local:
        if item.path == ADAPTER_CONFIG:
            document[key] = None  # peft expects the key
        else:
            del document[key]
    return replace(item, content=(json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def _document(name: str, content: bytes) -> Any:
    """Return the JSON of a config. Raises UsageError for anything else."""
    try:
        return decode_json(content, finite=False)
    except ValueError as error:
        raise UsageError(
            f"{name} is not JSON: {error}", fix="correct it, or remove it from the result's folder"
        ) from error


def _is_local(name: str) -> bool:
    return bool(PATH.match(name)) or name.startswith(".") or Path(name).is_dir()


def require_clean(items: Sequence[Item], places: Sequence[Path]) -> None:
    """Look into every file: UsageError for one with a token, the home folder, one of the folders `places`, or, in a
    config, any path of a machine."""
    found = [f"{item.path}: {problem}" for item in items for problem in _problems(item, places)]
    if found:
        raise UsageError(
            f"nothing was sent, because files contain private data: {'; '.join(found)}",
            expected="files without tokens and without paths of this machine",
            fix="remove it from the file in the result's folder",
        )


def _problems(item: Item, places: Sequence[Path]) -> Iterator[str]:
    is_weights = item.path.endswith(".safetensors")
    if not is_weights and item.size_bytes > MOST_BYTES * 16:
        yield f"{item.size_bytes:,} bytes, which is too large to search"
        return
    content = _header(item.content) if is_weights else item.read()
    token = get_token()
    yield from secrets_in(content)
    if token and token.encode() in content:
        yield "your hub token"
    vocabulary = any(fnmatch(item.path, pattern) for pattern in VOCABULARIES)
    told = [*map(str, places), *([] if vocabulary else [f"{Path.home()}/"])]
    yield from (f"the path {text}" for text in told if text.encode() in content)
    if _is_config(item.path) or is_weights:
        document = _document(item.path, content)
        texts = _texts(document.get("__metadata__") if is_weights and isinstance(document, dict) else document)
        yield from (f"the path {path} at {key}" for key, value in texts for path in _paths_in(key, value))


def _paths_in(key: str, value: str) -> Iterator[str]:
    """Yield the absolute paths in a value of a config."""
    is_template = key.rpartition(".")[2] == TEMPLATE
    if not is_template and PATH.match(value):
        yield value
        return
    for hit in PATH_INSIDE.finditer(value):
        if not is_template or Path(hit[0]).expanduser().exists():
            yield hit[0]


def _header(file: Path | bytes) -> bytes:
    """Of a safetensors file, names of tensors and metadata: all of its text. Raises UsageError for another file."""
    assert isinstance(file, Path)
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = opened.read(size) if size <= LARGEST_HEADER_BYTES else b""
    if not header or len(header) < size:
        raise UsageError(f"{file} is truncated or not a safetensors file", fix="save the result again")
    return header


def _texts(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(document, str):
        yield key, document
    elif isinstance(document, dict):
        for name, value in document.items():
            yield from _texts(value, f"{key}.{name}".lstrip("."))
    elif isinstance(document, list):
        for value in document:
            yield from _texts(value, key)


class _Patience:
    """Sends the requests of a client, each with a limit of time, and gives up after MOST_TIMEOUTS."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send, self._timeouts = send, 0

    def __call__(self, request: Any, **options: Any) -> Any:
        """Raise EnvironmentProblem for a hub that does not answer."""
        seconds = COMMIT_SECONDS if "/commit/" in request.url.path else ANSWER_SECONDS
        given = request.extensions.get("timeout") or {}
        limits = {
            kind: seconds if given.get(kind) is None else given[kind] for kind in ("connect", "read", "write", "pool")
        }
        request.extensions["timeout"] = limits
        try:
            return self._send(request, **options)
        except HTTPError as error:
            if "timeout" not in type(error).__name__.lower():
                raise
            self._timeouts += 1
            if self._timeouts < MOST_TIMEOUTS:
                raise
            raise EnvironmentProblem(
                f"the hub did not respond within {seconds:g} s, {MOST_TIMEOUTS} times",
                fix=f"check the network (tunedeck doctor), then {AGAIN}",
            ) from error


def _patient_client() -> Any:
    """Return a client of the hub's library whose requests all end: the library sets no limit of time."""
    client = default_client_factory()
    vars(client)["send"] = _Patience(client.send)
    return client


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function returns; raise what it raises, and EnvironmentProblem if it takes longer than `seconds`.
    It is then left alone in its thread, which does not keep the process from ending."""
    outcome: dict[str, Any] = {}

    def call() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread of the caller
            outcome["error"] = error

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise EnvironmentProblem(f"the upload did not finish within {seconds / 60:.0f} minutes", fix=AGAIN)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Inside the block, what the hub's client raises becomes an EnvironmentProblem, also for a hub that hangs."""
    set_client_factory(_patient_client)
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise EnvironmentProblem(
            "HF_HUB_OFFLINE is set, so nothing can be sent to the hub", fix="unset HF_HUB_OFFLINE"
        ) from error
    except LocalTokenNotFoundError as error:
        raise EnvironmentProblem("this machine has no hub token", fix=LOG_IN) from error
    except HFValidationError as error:
        raise UsageError(f"{repo!r} is not a valid repository name", expected="OWNER/NAME or NAME") from error
    except (*HUB_ERRORS, RuntimeError) as error:
        if isinstance(error.__cause__, EnvironmentProblem):
            raise error.__cause__ from error
        raise _refusal(error, repo) from error
    finally:
        set_client_factory(default_client_factory)


def _refusal(error: BaseException, repo: str) -> EnvironmentProblem:
    cause = error if isinstance(error, HfHubHTTPError) else error.__cause__
    if not isinstance(cause, HfHubHTTPError):
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        broken = not isinstance(error, RuntimeError | ValueError)
        return EnvironmentProblem(
            f"the hub does not respond, or the connection was lost: {first}"
            if broken
            else f"{repo} was not sent: {error}",
            fix=f"check the network (tunedeck doctor), then {AGAIN}" if broken else AGAIN,
        )
    status = cause.response.status_code
    said = (cause.server_message or str(cause)).strip().splitlines()[0]
    if status == 401:
        return EnvironmentProblem(f"the hub does not accept the token: {said}", fix=LOG_IN)
    if status == 403:
        return EnvironmentProblem(f"the token has no write access to {repo}: {said}", fix=LOG_IN)
    return EnvironmentProblem(f"the hub rejected {repo} ({status}): {said}", fix=AGAIN)


def connect(repo: str) -> tuple[HfApi, str]:
    """The client, and the repository as OWNER/NAME. Raises EnvironmentProblem without a token or a network."""
    api = HfApi()
    with hub_errors(repo):
        user = api.whoami()
    return api, repo if "/" in repo else f"{user['name']}/{repo}"


def look_at(api: HfApi, repo: str, *, public: bool) -> Place:
    """Raises UsageError for a public repository without `public`, and for a name that the hub does not allow."""
    with hub_errors(repo):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return Place(repo, False, not public, (), None)
    files = tuple(each.rfilename for each in info.siblings or ())
    if not info.private and not public:
        raise UsageError(f"{repo} is public", fix="add --public, or choose another repository")
    return Place(repo, True, bool(info.private), files, info.sha)


def license_of(api: HfApi, base: str | None) -> dict[str, str]:
    """As the base's card on the hub says; empty if there is no such model, or it does not say."""
    if base is None:
        return {}
    with hub_errors(base):
        try:
            card = api.model_info(base).card_data
        except HfHubHTTPError:
            return {}
    told = {} if card is None else {key: card.get(key) for key in ("license", "license_name", "license_link")}
    return {key: value for key, value in told.items() if isinstance(value, str)} if told.get("license") else {}


def has_card_of_others(api: HfApi, place: Place) -> bool:
    """Whether somebody wrote or edited the repository's card: it is then not replaced."""
    if CARD not in place.files:
        return False
    with hub_errors(place.repo), tempfile.TemporaryDirectory() as folder:
        file = api.hf_hub_download(place.repo, CARD, revision=place.commit, local_dir=folder)
        return not is_untouched(Path(file).read_text("utf-8", "replace"))


def stale_weights(place: Place, items: Sequence[Item]) -> list[str]:
    """Weights in the repository that the new ones replace: beside an adapter, a model would be opened in its place."""
    sent = {item.path for item in items}
    return sorted(name for name in place.files if name not in sent and any(fnmatch(name, it) for it in WEIGHTS))


def send(api: HfApi, place: Place, parcel: Parcel, message: str) -> tuple[str, bool]:
    """Upload, then commit all at once, so that the repository is never half of one result and half of another. Returns
    the address, and whether anything changed."""
    with hub_errors(place.repo):
        url = api.create_repo(place.repo, private=place.private, exist_ok=True)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(item.path, item.content if isinstance(item.content, bytes) else str(item.content))
            for item in parcel.items
        ]
        operations += [CommitOperationDelete(name) for name in parcel.stale]
        seconds = SENDING_SECONDS + parcel.size_bytes / SLOWEST_BYTES_PER_SECOND
        commit = within(seconds, lambda: api.create_commit(place.repo, operations, commit_message=message))
    return str(url), commit.oid != place.commit
