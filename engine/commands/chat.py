"""`tunedeck chat`: talks to runs, checkpoints and models, in a terminal or for a script."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.evaluate import prepare_libraries, spec_for_model
from engine.commands.shared import (
    JsonOption,
    OverridesOption,
    RunsOption,
    TrustOption,
    find_result_run,
    importing,
    make_console,
    print_json,
    print_progress,
)
from engine.errors import DataError, UsageError

if TYPE_CHECKING:
    from engine.chat.answer import Speaker
    from engine.chat.sources import ChatSource
    from engine.config.schema.run import RunSpec
    from engine.journal.directory import RunDirectory

CHAT_KEYS = ("generate.",)
"""Beginnings of the keys that `--set` may change for a run: the others say what was trained."""


@dataclass(frozen=True)
class Asked:
    base: bool
    plain: bool
    think: bool | None
    system: str | None
    profile: str | None
    recipe: str | None
    overrides: tuple[str, ...]
    trust_remote_code: bool
    runs: Path | None


def chat(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN[@STEP|@best]|MODEL]...",
            help="Runs, checkpoints, hub ids or folders of models; by default the last run.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Answer this and end; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="F", help="Answer each line, or row with a prompt (.jsonl).")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System prompt; by default the run's.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Also answer with the model that the run started from.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the text, outside the chat template.")] = False,
    think: Annotated[
        str | None, typer.Option("--think", metavar="on|off", help="Switch thinking, where the template can.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("-p", "--profile", help="Hardware profile; by default the run's, for a MODEL this machine."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("-r", "--recipe", help="With MODEL: a recipe whose settings count.")
    ] = None,
    overrides: OverridesOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Talk to runs, checkpoints and models, several side by side. With --prompt or --file, answer and end."""
    from engine.launch.requirements import require_training_packages

    require_training_packages()
    prompts = [*(prompt or []), *(_prompts_of(file) if file else [])]
    if as_json and not prompts:
        raise UsageError("--json needs prompts", fix="add --prompt TEXT or --file F")
    asked = Asked(base, plain, _switch(think), system, profile, recipe, tuple(overrides or ()), trust_remote_code, runs)
    sources = [source for target in targets or ["last"] for source in _sources(target, asked)]
    with importing():
        from engine.chat.sources import load_sources
        from engine.device import open_device
    device = open_device(sources[0].spec)
    with device.activate():
        models = load_sources(sources, device, print_progress)
        speakers = [_speaker(model, asked) for model in models]
        default_system = asked.system if asked.system is not None else sources[0].spec.recipe.data.system_prompt
        if prompts:
            _answer_all(speakers, prompts, default_system, as_json)
        else:
            from engine.commands.chat_terminal import talk

            talk(speakers, default_system)


def _switch(think: str | None) -> bool | None:
    if think not in (None, "on", "off"):
        raise UsageError(f"--think {think}", expected="on or off", fix="tunedeck chat last --think off")
    return None if think is None else think == "on"


def _prompts_of(path: Path) -> list[str]:
    """The lines of a text file, or the column `prompt` of a JSON Lines file. Raises DataError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [json.loads(line)["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--file {path}: {type(error).__name__}: {error}",
            expected='a line of text for each prompt, or a .jsonl file with {"prompt": "..."} rows',
            fix="correct the file or its name",
        ) from error
    if not lines or not all(isinstance(line, str) for line in lines):
        raise DataError(f"--file {path}: no prompts in it" if not lines else f"--file {path}: a prompt is no text",
                        expected="at least one prompt, each a text", fix="correct the file")  # fmt: skip
    return lines


def _sources(target: str, asked: Asked) -> list[ChatSource]:
    """What `target` names and, with --base, the model that it started from."""
    place, which = (None, None) if asked.recipe else _find_run(target, asked.runs)
    if place is None:
        return _of_model(target, asked)
    spec = _run_spec(place, asked)
    prepare_libraries(spec)
    with importing():
        from engine.chat.sources import ChatSource, weights_of_run
    weights = weights_of_run(place, which, print_progress)
    found = [ChatSource(target, spec, weights)]
    return [ChatSource(f"{target}'s base", spec, None), *found] if asked.base else found


def _find_run(target: str, runs: Path | None) -> tuple[RunDirectory | None, str | None]:
    """The run and its step or "best"; (None, None) if `target` names a model. Raises UsageError if it names neither."""
    from engine.config.files.find import BUILTIN_PREFIX

    name, _, which = target.rpartition("@") if "@" in target else (target, "", "")
    if target.startswith(BUILTIN_PREFIX) or (Path(target) / "config.json").is_file():
        return None, None
    if (Path(target) / "adapter_config.json").is_file():
        return None, None
    try:
        return find_result_run(name, runs), which or None
    except UsageError:
        if target.count("/") != 1 or Path(target).exists():
            raise
        return None, None


def _run_spec(place: RunDirectory, asked: Asked) -> RunSpec:
    """Raises UsageError for a key that a chat cannot change."""
    from engine.config.load import load_run_spec, override

    spec = load_run_spec(place.run_toml, own=True)
    refused = [text.partition("=")[0].strip() for text in asked.overrides if not text.strip().startswith(CHAT_KEYS)]
    if refused:
        raise UsageError(
            f"--set {', '.join(refused)}: a run answers as it was trained",
            expected="keys of [generate]",
            fix="leave it out",
        )
    if not asked.overrides and asked.profile is None:
        return spec
    name = spec.name.replace("/", "-")  # a stage's is RUN/STAGE, which is no name that a run may be given
    changed = override(spec, asked.overrides, profile=asked.profile, name=name).spec
    return changed.model_copy(update={"limits": spec.limits, "name": spec.name})


def _of_model(target: str, asked: Asked) -> list[ChatSource]:
    """A model, on this machine unless -p names a profile. Raises UsageError for --base if it is no adapter."""
    adapter = Path(target, "adapter_config.json").is_file()
    if asked.base and not adapter:
        raise UsageError(
            f"--base: {target} is not an adapter, so its base is not known",
            expected="a RUN, or the folder of an adapter",
            fix="name the base as a second model: tunedeck chat MODEL BASE",
        )
    recipe = asked.recipe or ("lora" if adapter else "full")
    with tempfile.TemporaryDirectory() as folder:
        profile = asked.profile or _profile_of_this_machine(Path(folder))
        spec = spec_for_model(target, recipe, profile, list(asked.overrides))
        limits = spec.limits.model_copy(update={"trust_remote_code": asked.trust_remote_code})
        spec = spec.model_copy(update={"limits": limits})
    prepare_libraries(spec)
    with importing():
        from engine.chat.sources import ChatSource
    found = [ChatSource(target, spec, None)]
    if asked.base:
        from engine.model.reference import base_of_adapter

        return [*_of_model(base_of_adapter(Path(target))[0], _without_base(asked)), *found]
    return found


def _without_base(asked: Asked) -> Asked:
    from dataclasses import replace

    return replace(asked, base=False)


def _profile_of_this_machine(folder: Path) -> str:
    """The path of a profile of the first GPU, else of the CPU."""
    from engine.config.files import write
    from engine.config.files.machine import detect_device

    device, title, notes = detect_device()
    path = folder / "this-machine.toml"
    path.write_text(write.new_profile("this-machine", device, title=title, notes=notes), encoding="utf-8")
    return str(path)


def _speaker(model: Any, asked: Asked) -> Speaker:
    from engine.chat.answer import Speaker
    from engine.chat.conversation import PromptTokens, was_trained_plain

    plain = asked.plain
    if not plain and was_trained_plain(model.spec):
        print_progress(f"{model.label} was trained on texts outside the chat template, and is asked so (--plain)")
        plain = True
    tokens = PromptTokens(model.label, model.loaded.tokenizer, model.spec, plain=plain, think=asked.think)
    return Speaker(model, tokens, model.spec.recipe.generate, print_progress)


def _answer_all(speakers: list[Speaker], prompts: list[str], system: str | None, as_json: bool) -> None:
    """Each prompt in a conversation of its own, by each model."""
    from rich.text import Text

    from engine.chat.conversation import Conversation
    from engine.config.files.text import visible

    found: list[dict[str, Any]] = []
    console = make_console(soft_wrap=True)
    for number, prompt in enumerate(prompts):
        for speaker in speakers:
            conversation = Conversation(None if speaker.tokens.plain else system)
            conversation.ask(prompt)
            answer = speaker.answer(conversation, number)
            several = {"model": speaker.model.label} if len(speakers) > 1 else {}
            found.append({**several, **asdict(answer)})
            if not as_json:
                label = f"{visible(speaker.model.label)}: " if several else ""
                console.print(Text(label + visible(answer.text, keep="\n\t")))
    if as_json:
        print_json({"answers": found}, indent=None)
