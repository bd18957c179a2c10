"""The models of a chat: which run, checkpoint, hub id or folder each target names, and how they are loaded."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.commands.shared import find_result_run, importing, prepare_libraries
from engine.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config.schema.run import RunSpec
    from engine.data.images import ImageProcessor
    from engine.extras.chat.answer import Speaker
    from engine.extras.chat.server import LoadedChat
    from engine.extras.chat.sources import ChatModel, ChatSource
    from engine.journal.directory import RunDirectory

CHAT_KEYS = ("generate.",)
"""Beginnings of the keys that `--set` may change for a run: the others say what was trained."""


@dataclass(frozen=True)
class Asked:
    """What a chat was asked for, as `chat.json` has it. Code of a hub model is allowed by the command line alone."""

    targets: tuple[str, ...]
    base: bool = False
    plain: bool = False
    think: bool | None = None
    system: str | None = None
    profile: str | None = None
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    runs: str | None = None

    @classmethod
    def of(cls, found: dict[str, Any]) -> Asked:
        """From `chat.json`. Raises UsageError for a file that another version wrote."""
        lists = {name: tuple(found.get(name) or ()) for name in ("targets", "overrides")}
        try:
            return cls(**{**found, **lists})
        except TypeError as error:
            raise UsageError(f"this chat was started by another version: {error}", fix="start a new chat") from error


def load_chat(
    asked: Asked, stack: ExitStack, notify: Callable[[str], None], *, trust_remote_code: bool = False
) -> LoadedChat:
    """Load the models of a chat on the device of the first; it stays open for the stack's life.

    Raises TunedeckError: no such model, no room in free memory, a busy or missing device.
    """
    sources = [
        source
        for target in dict.fromkeys(asked.targets)
        for source in _sources(target, asked, notify, trust_remote_code)
    ]
    with importing():
        from engine.device.open import open_device
        from engine.extras.chat.server import LoadedChat
        from engine.extras.chat.sources import ChatModel, load_sources, without_repeated_bases
    sources = without_repeated_bases(sources)
    device = open_device(sources[0].spec, beside=True)
    for notice in device.notices:
        notify(notice)
    stack.enter_context(device.activate())
    models = load_sources(sources, device, notify)
    speakers = [_speaker(model, asked, notify) for model in models]
    system = asked.system if asked.system is not None else sources[0].spec.recipe.data.system_prompt
    first = models[0]
    base = None
    if (
        first.adapter is not None
        and not first.loaded.changed_base
        and not any(model.loaded is first.loaded and model.adapter is None for model in models)
    ):
        base = _speaker(ChatModel(f"{first.label}'s base", first.spec, first.loaded, None), asked, lambda text: None)
    return LoadedChat(speakers, base, system, device.name)


def _sources(target: str, asked: Asked, notify: Callable[[str], None], trust_remote_code: bool) -> list[ChatSource]:
    """What `target` names and, with --base, the model that it started from."""
    place, which = (None, None) if asked.recipe else find_run_of(target, Path(asked.runs) if asked.runs else None)
    if place is None:
        return _of_model(target, asked, trust_remote_code)
    spec = _run_spec(place, asked)
    prepare_libraries(spec)
    with importing():
        from engine.extras.chat.sources import ChatSource, weights_of_run
    weights = weights_of_run(place, which, notify)
    found = [ChatSource(target, spec, weights)]
    return [ChatSource(f"{target}'s base", spec, None, base=True), *found] if asked.base else found


def find_run_of(target: str, runs: Path | None) -> tuple[RunDirectory | None, str | None]:
    """The run and its step or "best"; (None, None) if `target` names a model. Raises UsageError if it names neither."""
    from engine.config.files.find import BUILTIN_PREFIX

    name, _, which = target.rpartition("@") if "@" in target else (target, "", "")
    if target.startswith(BUILTIN_PREFIX) or (Path(target) / "config.json").is_file():
        return None, None
    if (Path(target) / "adapter_config.json").is_file():
        return None, None
    try:
        return find_result_run(name, runs), which or None
    except UsageError as error:
        if target.count("/") == 1 and not Path(target).exists():
            return None, None
        if not error.expected:
            raise
        models = "or a model: OWNER/NAME on the hub, or a folder"
        raise UsageError(error.found, expected=f"{error.expected}; {models}", fix=error.fix) from error


def _run_spec(place: RunDirectory, asked: Asked) -> RunSpec:
    """Raises UsageError for a key that a chat cannot change."""
    from engine.config.load import load_run_spec, override

    spec = load_run_spec(place.run_toml, own=True)
    refused = [text.partition("=")[0].strip() for text in asked.overrides if not text.strip().startswith(CHAT_KEYS)]
    if refused:
        raise UsageError(
            f"--set {', '.join(refused)}: a chat with a run can only change keys of [generate]",
            expected="keys of [generate]",
            fix="leave it out",
        )
    if not asked.overrides and asked.profile is None:
        return spec
    name = spec.name.replace("/", "-")  # a stage's is RUN/STAGE, which is no name that a run may be given
    changed = override(spec, asked.overrides, profile=asked.profile, name=name).spec
    return changed.model_copy(update={"limits": spec.limits, "name": spec.name})


def _of_model(target: str, asked: Asked, trust_remote_code: bool) -> list[ChatSource]:
    """A model, on this machine unless -p names a profile. Raises UsageError for one that can't answer, and for --base
    if it is no adapter."""
    from engine.checks.run import check_model
    from engine.commands.model_specs import spec_for_base, spec_for_model

    recipe = asked.recipe or ("lora" if Path(target, "adapter_config.json").is_file() else "full")
    specs: dict[str, RunSpec] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = asked.profile or _profile_of_this_machine(Path(folder)), asked.overrides
        if asked.base:
            specs[f"{target}'s base"] = spec_for_base(
                target, asked.recipe or "full", *settings, "chat", trust_remote_code=trust_remote_code
            )
        specs[target] = spec_for_model(target, recipe, *settings, trust_remote_code=trust_remote_code)
    for spec in specs.values():
        check_model(spec)
        prepare_libraries(spec)
    with importing():
        from engine.extras.chat.sources import ChatSource
    return [ChatSource(name, spec, None) for name, spec in specs.items()]


def _profile_of_this_machine(folder: Path) -> str:
    """The path of a profile of the first GPU, else of the CPU."""
    from engine.config.files import write
    from engine.config.files.machine import detect_device

    device, title, notes = detect_device()
    path = folder / "this-machine.toml"
    path.write_text(write.new_profile(None, device, title=title, notes=notes), encoding="utf-8")
    return str(path)


def _speaker(model: ChatModel, asked: Asked, notify: Callable[[str], None]) -> Speaker:
    from engine.data.prompts import PromptTokens, was_trained_plain
    from engine.extras.chat.answer import Speaker

    plain = asked.plain
    if not plain and was_trained_plain(model.spec):
        notify(f"{model.label} was trained on plain text, so prompts do not use the chat template (--plain)")
        plain = True
    images = None if plain else _image_processor(model, notify)
    tokens = PromptTokens(
        model.label, model.loaded.tokenizer, model.spec, plain=plain, think=asked.think, images=images
    )
    return Speaker(model, tokens, model.spec.recipe.generate, notify)


def _image_processor(model: ChatModel, notify: Callable[[str], None]) -> ImageProcessor | None:
    """None, said where the model has a vision encoder, if images cannot be shown to it here."""
    from engine.model.tokenizer import load_chat_processor

    try:
        return load_chat_processor(model.spec, model.loaded.tokenizer)
    except (UsageError, EnvironmentProblem) as error:
        notify(f"{model.label} does not receive images: {error.found}")
        return None
