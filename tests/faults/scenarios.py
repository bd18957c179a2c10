"""What is disturbed: commands in a folder of their own, how a user gets past what a fault has stopped, and what there
must be at the end. `every_write.py` and others disturb them. Not a test module."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from engine.journal.chats import Exchange, is_answering, list_chats, read_chat
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import read_evaluations, values_of
from engine.launch.process import ENTRY_FILE
from tests.cli.small_recipes import write_profile, write_recipe
from tests.conftest import FOLDERS
from tests.journal.waiting import until

PATIENCE_SECONDS = 900.0

TRAINING = (("max_steps = 2", "max_steps = 4"), ("every_steps = 1", "every_steps = 2\nkeep = 1"),
            ("micro_batch = 2\n", "micro_batch = 2\nseed = 3\n"))  # fmt: skip
EVALUATION = '\n[eval]\nevery_steps = 2\nlimit = 2\n\n[[data.validation]]\nname = "held"\npath = "data.jsonl"\n'


@dataclass
class Ended:
    """How a command ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str


class Place:
    """A folder with a recipe, a profile, runs and the user's own folders."""

    def __init__(self, folder: Path, more: str = "", profile: str = "", method: str = 'kind = "full"') -> None:
        self.folder = folder.resolve()
        self.runs, self.input = self.folder / "runs", self.folder / "input"
        for each in ("input", "runs", *(name.lower() for name in FOLDERS)):
            (self.folder / each).mkdir(parents=True, exist_ok=True)
        changes = (*TRAINING, ('kind = "full"', method))
        self.recipe = write_recipe(self.input, *changes, more=EVALUATION + more)
        self.profile = write_profile(self.input, ("memory_gib = 8.0", "memory_gib = 8.0\n" + profile))
        # Read late: with another HF_HOME than the fork server has, every command would start an interpreter.
        self.environment = {name: str(self.folder / name.lower()) for name in FOLDERS if name.startswith("TUNEDECK_")}
        self.environment["TUNEDECK_RUNS"] = str(self.runs)
        self.cache = Path(self.environment["TUNEDECK_CACHE"])
        self.ended: list[Ended] = []
        self.running: subprocess.Popen[str]

    def call(self, *words: object, text: str = "", program: Sequence[str] = (str(ENTRY_FILE),)) -> Ended:
        """Run one command to its end; it reads `text`. `program`: what Python runs."""
        command = [sys.executable, "-P", *program, *map(str, words)]
        with subprocess.Popen(
            command, cwd=self.input, env={**os.environ, **self.environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            self.running = process
            out, err = process.communicate(text, timeout=PATIENCE_SECONDS)
        self.ended.append(Ended(tuple(map(str, words)), process.returncode, out, err))
        return self.ended[-1]

    def found(self) -> list[RunDirectory]:
        """The runs that are there."""
        return [RunDirectory(path) for path in sorted(self.runs.glob("[!.]*")) if (path / "run.toml").is_file()]


def train(place: Place) -> None:
    place.call("train", "-p", place.profile, "-r", place.recipe)


def queue_up(place: Place) -> None:
    for name in sorted({"one", "two"} - {stem(run) for run in place.found()}):
        place.call("queue", "add", "-p", place.profile, "-r", place.recipe, "--name", name)


def queue(place: Place) -> None:
    queue_up(place)
    place.call("queue", "start")


def look_at_queue(place: Place) -> None:
    place.call("queue", "list")
    place.call("queue", "start")


def sweep(place: Place) -> None:
    place.call("train", "-p", place.profile, "-r", place.recipe, "--set", 'sweep."train.seed"=[3, 4]')


def evaluate(place: Place) -> None:
    place.call("eval", "last", "--limit", "2")


def sync(place: Place) -> None:
    place.call("sync", "last", "--to", "tensorboard")


QUESTIONS = ("One plus one is", "Two plus two is")
SAVED = "conversations.jsonl"


def chat(place: Place) -> None:
    """Ask two questions and keep the answers, in the chat that was begun or a new one."""
    chats = list_chats(place.runs)
    until(lambda: all(map(is_settled, chats)))
    answered = [exchange.question for exchange in read_chat(chats[0]).exchanges if answers(exchange)] if chats else []
    lines = [*(question for question in QUESTIONS if question not in answered), f"/save {SAVED}", "/quit"]
    targets = ("--attach", chats[0].name) if chats else ("last", "--set", "generate.max_new_tokens=24")
    place.call("chat", *targets, text="\n".join(lines) + "\n")
    wait_for_chats(place)


def is_settled(directory: RunDirectory) -> bool:
    """Whether a chat has answered what it was asked, or will not; who asks meanwhile asks a second time."""
    is_answered = all(map(answers, read_chat(directory).exchanges)) and not any(directory.control.glob("*.json"))
    return is_answered or not is_answering(directory)


def left_chat(place: Place) -> None:
    train(place)
    place.call("chat", "last", "--set", "generate.max_new_tokens=24", text=f"{QUESTIONS[0]}\n/quit\n")
    wait_for_chats(place)


def look_at_chat(place: Place) -> None:
    if list_chats(place.runs):
        place.call("chat", "--attach", "last", text="/leave\n")


def wait_for_chats(place: Place) -> None:
    """The command does not wait for the end of the chat's process, which goes on if the command was killed."""
    if place.ended[-1].code == 0:
        until(lambda: not any(map(is_answering, list_chats(place.runs))))


def answers(exchange: Exchange) -> list[str]:
    """The complete answers to a question."""
    return [reply.text for reply in exchange.replies.values() if reply.stopped_by]


def of_chats(place: Place) -> dict[str, str]:
    """Each answer to each question, and each row that was saved."""
    found = {}
    asked = [exchange for each in list_chats(place.runs) for exchange in read_chat(each).exchanges]
    for number, exchange in enumerate(exchange for exchange in asked if answers(exchange)):
        found[f"answer {number} to {exchange.question}"] = repr(answers(exchange))
    saved = place.input / SAVED
    lines = saved.read_text().splitlines() if saved.exists() else []
    return {**found, **{f"row {row}": "" for row in {json.dumps(json.loads(line)) for line in lines}}}


def prepare_data(place: Place) -> None:
    place.call("data", "-r", place.recipe, "--prepare")


def digests(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """The SHA-256 of each file of a folder; drafts have a hidden name."""
    named = {path.relative_to(folder): path for path in sorted(folder.glob(pattern)) if path.is_file()}
    return {name.as_posix(): sha256(path.read_bytes()).hexdigest() for name, path in named.items()
            if not any(part.startswith(".") for part in name.parts)}  # fmt: skip


def tokens(place: Place) -> dict[str, str]:
    return {name: digest for name, digest in digests(place.cache / "tokens").items() if not name.endswith(".lock")}


ARCHIVE = "kept.tunedeck"


def export(place: Place) -> None:
    if not (place.input / ARCHIVE).exists():
        place.call("export", "last", "--weights", "--out", ARCHIVE)


def archived(place: Place) -> dict[str, str]:
    """The members of the archive; their times differ."""
    if not (place.input / ARCHIVE).exists():
        return {}
    with zipfile.ZipFile(place.input / ARCHIVE) as archive:
        return {name: sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def archive_alone(place: Place) -> None:
    train(place)
    export(place)
    for run in place.found():
        place.call("rm", run.name)
    shutil.rmtree(place.runs)
    place.runs.mkdir()


def import_archive(place: Place) -> None:
    if not place.found():
        place.call("import", ARCHIVE)


def imported(place: Place) -> dict[str, str]:
    return {name: digest for run in place.found() for name, digest in digests(run.path).items()}


def merge(place: Place) -> None:
    if not (place.found()[0].path / "merged").exists():
        place.call("merge", "last")


def merged(place: Place) -> dict[str, str]:
    return digests(place.found()[0].path, "merged/**/*")


def hand_over(place: Place) -> None:
    place.call("handover", "last", "--ollama", "--converter", place.folder.parent / PROGRAMS / "converter")


def hand_over_checked(place: Place) -> None:
    """Convert, quantize, and ask the server of llama.cpp."""
    converter = place.folder.parent / PROGRAMS / "converter"
    place.call("handover", "last", "--gguf", "--converter", converter, "--outtype", "Q4_K_M", "--check")


PROGRAMS = "programs"
"""The folder, beside those of places, of programs that a handover starts."""
SMALL = Path(__file__).parents[1] / "handover"


def write_programs(folder: Path) -> Path:
    """Write small look-alikes of the programs that a handover starts; returns their folder, for $PATH."""
    programs = folder / PROGRAMS
    programs.mkdir()
    for name, line in (
        ("converter", f'{sys.executable} -I -S {SMALL / "small_converter.py"} "$@"'),
        ("llama-server", f'{sys.executable} -I -S {SMALL / "small_server.py"} "$@"'),
        ("llama-quantize", 'dd if="$1" of="$2" status=none'),
    ):
        (programs / name).write_text(f"#!/bin/sh\nexec {line}\n")
        (programs / name).chmod(0o755)
    return programs


def handed_over(place: Place) -> dict[str, str]:
    """What a handover wrote, without the logs of servers."""
    found = digests(place.found()[0].path, "handover/**/*")
    return {name: digest for name, digest in found.items() if not name.endswith(".log")}


def evaluate_tasks(place: Place) -> None:
    folder = place.input / "tasks"
    folder.mkdir(exist_ok=True)
    (folder / "sums.yaml").write_text("task: sums\n")
    place.call("eval", "last", "--harness", "sums", "--include-path", folder)


def scored(place: Place) -> dict[str, str]:
    """The scores by step, each once."""
    run = place.found()[0]
    return {f"{each.data} at {each.step}": repr((sorted(each.metrics.items()), each.count,
                                                 values_of(run, each, next(iter(each.metrics)))))
            for each in read_evaluations(run)}  # fmt: skip


SIGNALS_AND_ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES", "killed")
EVERY_FAULT = (*SIGNALS_AND_ERRORS, "stopped", "clock set on", "clock set back", "runs moved", "cache deleted")


@dataclass(frozen=True)
class Scenario:
    """What is disturbed, in which kind of place, and what it must leave."""

    name: str
    disturbed: Callable[[Place], None]
    before: Callable[[Place], None] = lambda place: None
    runs: int = 1
    """How many runs it leaves."""
    more: str = ""
    profile: str = ""
    method: str = 'kind = "full"'
    files: Callable[[Place], dict[str, str]] | None = None
    """Of a process that is no run: what it writes, as texts that are equal if it is. The same command again makes what
    is missing."""
    whole: bool = True
    """Whether these appear together or not at all."""
    beside: Callable[[Place], object] = lambda place: None
    """What is done while the process is stopped, and has gone on when it ends."""
    root: str = "."
    """The folder whose changes are cut, in the place."""
    faults: tuple[str, ...] = EVERY_FAULT

    def place(self, folder: Path) -> Place:
        return Place(folder, self.more, self.profile, self.method)


def stem(run: RunDirectory) -> str:
    """The run's name without its time, and without the number of a second one."""
    return re.sub(r"-2$", "", run.name.partition("-")[2])


STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'
TRACKED = '\n[trackers]\nuse = ["tensorboard"]\n'
LORA = 'kind = "lora"\nrank = 2'
RUN = partial(Scenario, root="runs", faults=SIGNALS_AND_ERRORS)
SCENARIOS = (
    RUN("single run", train),
    RUN("two ranks", train, profile="count = 2\n"),
    RUN("staged run", train, more=STAGES),
    RUN("queue", queue, runs=2),
    RUN("queue worker", queue, before=queue_up, runs=2, faults=EVERY_FAULT, beside=look_at_queue),
    RUN("sweep", sweep, runs=2),
    RUN("evaluation", evaluate, before=train),
    RUN("tracked run", train, more=TRACKED),
    RUN("sync", sync, before=train, faults=EVERY_FAULT, beside=sync),
    Scenario("data --prepare", prepare_data, runs=0, files=tokens, whole=False, beside=prepare_data),
    Scenario("chat", chat, before=train, files=of_chats, whole=False, beside=look_at_chat),
    Scenario("chat --attach", chat, before=left_chat, files=of_chats, whole=False, beside=look_at_chat),
    Scenario("export", export, before=train, files=archived, beside=export),
    Scenario("import", import_archive, before=archive_alone, files=imported),
    Scenario("merge", merge, before=train, method=LORA, files=merged, beside=merge),
    Scenario("handover", hand_over, before=train, method=LORA, files=handed_over, whole=False, beside=hand_over),
    Scenario(
        "handover --check",
        hand_over_checked,
        before=train,
        method=LORA,
        files=handed_over,
        whole=False,
        beside=hand_over_checked,
    ),
    Scenario("tasks", evaluate_tasks, before=train, files=scored, whole=False, beside=evaluate_tasks),
)
