"""`tunedeck chat`: talks to runs, checkpoints and models, in a terminal or for a script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.chat_sources import Asked, find_run_of, load_chat
from engine.commands.completion import run_names
from engine.commands.shared import (
    JsonOption,
    OverridesOption,
    RunsOption,
    TrustOption,
    importing,
    make_console,
    print_json,
    print_progress,
    print_rows,
    profile_option,
    recipe_option,
    runs_folder,
)
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.extras.chat.answer import Speaker


TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN[@STEP|@best]|MODEL]...",
        autocompletion=run_names,
        help="Runs, checkpoints, hub ids or model folders; by default the last run.",
        show_default=False,
    ),
]
PromptOption = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Answer this prompt and exit; may be repeated.")
]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", metavar="F", help="Answer each line of a text file, or each prompt of a .jsonl file."),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System prompt; by default that of the run.")
]
BaseOption = Annotated[bool, typer.Option("--base", help="Also answer with the model that the run started from.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Continue the text without the chat template.")]
ThinkOption = Annotated[
    str | None,
    typer.Option("--think", metavar="on|off", help="Switch thinking on or off, if the template supports it."),
]
ChatProfile = Annotated[
    str | None, profile_option("Hardware profile; by default that of the run, or this machine for a MODEL.")
]
ChatRecipe = Annotated[str | None, recipe_option("With MODEL: the recipe with the settings to use.")]
AttachOption = Annotated[
    str | None, typer.Option("--attach", metavar="CHAT|last", help="Continue a chat that you left.")
]
ListOption = Annotated[bool, typer.Option("--list", help="List chats and show which are still running.")]


def chat(
    targets: TargetsArgument = None,
    prompt: PromptOption = None,
    file: FileOption = None,
    system: SystemOption = None,
    base: BaseOption = False,
    plain: PlainOption = False,
    think: ThinkOption = None,
    profile: ChatProfile = None,
    recipe: ChatRecipe = None,
    overrides: OverridesOption = None,
    trust_remote_code: TrustOption = False,
    attach: AttachOption = None,
    list_chats: ListOption = False,
    as_json: JsonOption = False,
    runs: RunsOption = None,
) -> None:
    """Chat with runs, checkpoints and models, several side by side. With --prompt or --file, answer and exit."""
    from engine.checks.machine import require_training_packages

    if list_chats:
        _list(runs)
        return
    from engine.config.files.data_files import read_prompts

    require_training_packages()
    prompts = [*(prompt or []), *(read_prompts(file, "--file") if file else [])]
    if as_json and not prompts:
        raise UsageError("--json needs a prompt", fix="add --prompt TEXT or --file F")
    asked = Asked(
        tuple(targets or ["last"]), base, plain, _switch(think), system, profile, recipe, tuple(overrides or ()),
        str(runs) if runs else None,
    )  # fmt: skip
    if not prompts:
        _talk(asked, attach, runs, trust_remote_code)
        return
    if attach is not None:
        raise UsageError("--attach continues a conversation and takes no prompts", fix="leave out --prompt and --file")
    with ExitStack() as stack:
        chat = load_chat(asked, stack, print_progress, trust_remote_code=trust_remote_code)
        _answer_all(chat.speakers, prompts, chat.system, as_json)


def _talk(asked: Asked, attach: str | None, runs: Path | None, trust_remote_code: bool) -> None:
    from engine.commands.chat_terminal import talk
    from engine.launch.other_processes import begin_chat, find_chat, take_up_chat

    folder = runs_folder(runs)
    if attach is not None:
        directory = find_chat(attach, folder)
        take_up_chat(directory, trust_remote_code=trust_remote_code)
    else:
        for target in asked.targets if asked.recipe is None else ():
            find_run_of(target, runs)  # a name that nothing has is refused before a process starts
        directory = begin_chat(folder, asdict(asked), trust_remote_code=trust_remote_code)
    talk(directory)


def _list(runs: Path | None) -> None:
    from engine.journal.chats import list_chats, read_chat
    from engine.journal.event_text import clean

    rows = []
    for directory in list_chats(runs_folder(runs)):
        state = read_chat(directory)
        last = state.exchanges[-1].question if state.exchanges else ""
        facts = f"{state.status:<10}{', '.join(map(clean, state.models))}  {last[:60]!r}"
        rows.append((clean(directory.name), facts))
    if rows:
        print_rows(rows)
    else:
        print_progress(f"no chats in {runs_folder(runs)}")


def chat_process(
    directory: Annotated[Path, typer.Argument()],
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Be the process of a chat: started by `chat` and by the console, never by hand."""
    from engine.journal.chats import read_asked
    from engine.journal.directory import RunDirectory

    place = RunDirectory(directory.absolute())
    asked = Asked.of(read_asked(place))
    with importing():
        from engine.extras.chat.server import serve
    load = partial(load_chat, asked, trust_remote_code=trust_remote_code)
    raise typer.Exit(serve(place, list(asked.targets), load))


def _switch(think: str | None) -> bool | None:
    if think not in (None, "on", "off"):
        raise UsageError(f"--think {think}", expected="on or off", fix="add --think off; or --think on")
    return None if think is None else think == "on"


def _answer_all(speakers: list[Speaker], prompts: list[str], system: str | None, as_json: bool) -> None:
    """Each prompt in a conversation of its own, by each model."""
    from rich.text import Text

    from engine.config.files.text import visible
    from engine.extras.chat.answer import Conversation

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
