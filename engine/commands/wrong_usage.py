"""Finds what was meant by arguments that the parser refused, and writes the command that would have been right."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from engine.config.files.data_files import LOADERS, suffix_of
from engine.errors import UsageError

COMMANDS = {
    "start": "train", "run": "train", "demo": "train -p demo -r demo", "finetune": "train", "fine-tune": "train",
    "sft": "train", "dpo": "train",
    "help": "--help", "version": "--version", "ls": "runs", "list": "runs", "ps": "runs", "status": "runs",
    "logs": "log last", "tail": "log last -f", "follow": "watch last", "attach": "watch last", "kill": "stop last",
    "cancel": "stop last", "info": "show last", "continue": "resume last", "evaluate": "eval last",
    "test": "eval last", "generate": "chat last", "talk": "chat last", "infer": "chat last",
    "serve": "handover last --vllm", "deploy": "handover last --vllm", "vllm": "handover last --vllm",
    "sglang": "handover last --sglang", "ollama": "handover last --ollama", "gguf": "handover last --gguf",
    "convert": "handover last --gguf",
    "upload": "push last OWNER/NAME", "publish": "push last OWNER/NAME", "delete": "rm last",
    "remove": "rm last", "init": "recipes new my-recipe", "new": "recipes new my-recipe",
    "config": "recipes list",
    "profile": "profiles list", "recipe": "recipes list", "estimate": "plan",
    "env": "doctor", "gpus": "doctor", "check": "plan", "dataset": "data",
}  # fmt: skip
"""Words that people try as a command, and the command that does it."""

OPTIONS = {
    "config": ("-r",), "c": ("-r",), "output_dir": ("--runs",), "output": ("--runs",), "out": ("--runs",),
    "o": ("--runs",), "gpus": ("--devices",), "gpu": ("--devices",), "device": ("--devices",),
    "run_name": ("--name",), "data": ("--set", "data.sources.0.path="), "dataset": ("--set", "data.sources.0.path="),
    "data_path": ("--set", "data.sources.0.path="), "train_file": ("--set", "data.sources.0.path="),
    "model": ("--set", "model.id="), "m": ("--set", "model.id="), "steps": ("--set", "train.max_steps="),
}  # fmt: skip
"""Other tools' options and ours. The value is appended to a word that ends in "=", else follows as a word."""

CALLS_WITH_A_RECIPE = ("train", "plan", "advise", "fit", "data")

FLAGS_OF_CONSOLE = {
    "-p": 1, "--profile": 1, "-r": 1, "--recipe": 1, "--set": 1, "--runs": 1, "--theme": 1, "--ascii": 0,
}  # fmt: skip
"""What may stand behind `tunedeck` without a command, and how many values follow it."""

OPTIONS_OF_TRAIN = ("--force", "--name", "--devices", "--detach", "--json", "--max-hours", "--on-finish", "--run-spec",
                    "--trust-remote-code", "--wait")  # fmt: skip
"""What is asked of the console although only `train` takes it."""

TAKE_PROFILE_AND_RECIPE = ("train", "plan", "advise", "fit", "launch", "eval", "chat")
TAKE_RUNS = ("train", "resume", "stop", "pause", "checkpoint", "wait", "runs", "show", "watch", "log", "compare", "tag",
             "rename", "rm", "eval", "chat", "merge", "handover", "push", "export", "sync", "report")  # fmt: skip

WRITE_ONE_RESULT = ("export", "handover", "merge", "report")
"""What they write goes where --out says; what others write is a run."""
COMMANDS_OF_GROUPS = ("list", "show", "check", "new", "export", "import", "schema")

NEAR_ENOUGH = 0.75
"""How alike a misspelled command and a known one must be (0 to 1): "push" is not a misspelled "pause"."""


WHAT_EXISTS = {
    "dpo": 'train, with method.objective = "dpo" in the recipe (docs/preferences.md)',
}
"""Said beside the command that is nearest to something that does not exist."""


def refusal(message: str, arguments: Sequence[str], command: str) -> UsageError:
    """The error for a message of the parser; `command` is the command that refused `arguments`."""
    meant = right_command(message, arguments)
    if message.startswith("No such option") and command == "tunedeck":
        message = _of_console(message, arguments)
    near = re.search(r" Did you mean '(.*)'\?", message)
    if near and near[1] not in shlex.split(meant or ""):
        message = message.replace(near[0], "")  # a similar spelling misleads where the word means something else
    unknown = re.match(r"No such command '(.+?)'\.", message)
    return UsageError(
        re.sub(r" \(Possible options: .*\)", "", message),
        expected=WHAT_EXISTS.get(unknown[1], "") if unknown else "",
        fix=meant or f"{command} --help",
    )


def right_command(message: str, arguments: Sequence[str]) -> str | None:
    """The command line that was probably meant; None if nothing better than the help is known. `message` differs for
    each kind of mistake; `arguments` are the refused words."""
    words = list(arguments)
    meant = (
        _flags_before_command(message, words)
        or _other_command(message, words)
        or _other_option(message, words)
        or _stray_argument(message, words)
        or _missing_file(message, words)
    )
    if meant and (meant[0] in CALLS_WITH_A_RECIPE or _scores_a_model(meant)):
        meant = _with_files(meant)
    return shlex.join(["tunedeck", *meant]) if meant else None


def _flags_before_command(message: str, words: list[str]) -> list[str] | None:
    """The console's flags before a command, or an option of `train`, go behind it; those that it does not take are left
    out."""
    given, rest = _split_flags(words)
    if not given or not rest or not message.startswith("No such option"):
        return None
    if rest[0].partition("=")[0] in OPTIONS_OF_TRAIN:
        return ["train", *(word for each in given if each[0] not in ("--theme", "--ascii") for word in each), *rest]
    if rest[0].startswith("-"):
        return None
    kept = {"--runs"} if rest[0] in TAKE_RUNS else set()
    if rest[0] in TAKE_PROFILE_AND_RECIPE:
        kept |= {"-p", "--profile", "-r", "--recipe", "--set"}
    if rest[0] == "data":
        kept |= {"-r", "--recipe", "--set"}
    return [*rest, *(word for each in given if each[0].partition("=")[0] in kept for word in each)]


def _split_flags(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The console's flags at the beginning, each with its value, and the words behind them."""
    given: list[list[str]] = []
    rest = list(words)
    while rest and (flag := rest[0].partition("=")[0]) in FLAGS_OF_CONSOLE:
        taken = 1 if "=" in rest[0] else 1 + FLAGS_OF_CONSOLE[flag]
        given.append(rest[:taken])
        rest = rest[taken:]
    return given, rest


def _of_console(message: str, words: Sequence[str]) -> str:
    """The parser names the first flag of the console, which is right: the message about the word that is wrong."""
    given, rest = _split_flags(words)
    if not given:
        return message
    if rest and rest[0].startswith("-"):
        return f"No such option without a command: {rest[0].partition('=')[0]}"
    flag = given[-1][0]
    if not rest and "=" not in flag and len(given[-1]) <= FLAGS_OF_CONSOLE[flag]:
        return f"Option '{flag}' needs a value"
    return f"{given[0][0].partition('=')[0]} is before the command" if rest else message


def _other_command(message: str, words: list[str]) -> list[str] | None:
    found = re.match(r"No such command '(.+?)'\.", message)
    if found is None:
        return None
    if found[1] in COMMANDS and words[:1] == [found[1]]:
        return _called_with(COMMANDS[found[1]].split(), words[1:])
    near = re.search(r"Did you mean '(.+?)'", message)
    if near is None or near[1].startswith("_") or SequenceMatcher(None, found[1], near[1]).ratio() < NEAR_ENOUGH:
        return None
    return [near[1] if word == found[1] else word for word in words]


def _called_with(meant: list[str], given: list[str]) -> list[str]:
    """The command `meant` with the words that were given to the one that does not exist."""
    if meant[0] in CALLS_WITH_A_RECIPE:
        return [*meant, *given]
    if meant[0] in ("recipes", "profiles") and given[:1] and given[0] in COMMANDS_OF_GROUPS:
        return [meant[0], *given]
    if not given or given[0].startswith("-") or meant[-1] in ("--help", "--version", "runs", "doctor", "list"):
        return meant
    if meant[0] == "show":
        return ["show", given[0]]  # not the name of a repository
    if meant[0] == "push":
        return [*meant[:1], *given, *meant[1 + len(given) :]]
    if meant[:2] == ["recipes", "new"]:
        return [*meant[:2], *given]
    return [meant[0], *given, *(word for word in meant[2:] if word.startswith("-") and word not in given)]


def _other_option(message: str, words: list[str]) -> list[str] | None:
    found = re.match(r"No such option: (--?[\w-]+)", message)
    if found is None:
        return None
    at = next((index for index, word in enumerate(words) if word.partition("=")[0] == found[1]), None)
    if at is None:
        return None
    _, equals, value = words[at].partition("=")
    taken = 1
    if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
        value, taken = words[at + 1], 2
    name = found[1].lstrip("-").lower().replace("-", "_")
    instead = _option(name, value or "true")
    if instead and instead[0] == "--runs" and words[0] in WRITE_ONE_RESULT:
        instead = ["--out", value]
    return [*words[:at], *instead, *words[at + taken :]] if instead else None


def _option(name: str, value: str) -> list[str]:
    if name in OPTIONS:
        head, *rest = OPTIONS[name]
        return [head, rest[0] + value] if rest else [head, value]
    from engine.config.check.aliases import translate_key
    from engine.config.check.check import keys_named
    from engine.config.check.overrides import parse_value
    from engine.config.schema.recipe import Recipe

    parsed = parse_value(value)
    answer = translate_key(name, parsed, {name: parsed})
    if answer is not None:
        pairs = re.findall(r'([a-z_]+\.[a-z_.]+) = ("[^"]*"|[^,( ]+)', answer[1])
        return [part for key, ours in pairs for part in ("--set", f"{key}={ours.strip(chr(34))}")]
    keys = [key for key in keys_named(Recipe, name) if "[" not in key]
    return ["--set", f"{keys[0]}={value}"] if keys else []


def _stray_argument(message: str, words: list[str]) -> list[str] | None:
    found = re.match(r"Got unexpected extra argument\(?s?\)? \((.+)\)", message)
    if found is None or words[0] not in CALLS_WITH_A_RECIPE:
        return None
    stray = found[1].split()[0]
    at = next((index for index in range(len(words) - 1, 0, -1) if words[index] == stray), 0)
    if at > 1 and words[at - 2] == "--set" and "=" not in words[at - 1]:
        return [*words[: at - 1], f"{words[at - 1]}={stray}", *words[at + 1 :]]
    if at and (suffix_of(Path(stray)) in LOADERS or not _gives_recipe(words)):
        return [*words[:at], *_given_as(stray), *words[at + 1 :]]
    return None


def _missing_file(message: str, words: list[str]) -> list[str] | None:
    if not re.match(r"Missing option '-[pr]'", message):
        return None
    at = next((at for at in range(1, len(words)) if _is_stray_file(words, at)), None)
    if at is None:
        return words
    return [*words[:at], *_given_as(words[at]), *words[at + 1 :]]


def _is_stray_file(words: list[str], at: int) -> bool:
    return not words[at - 1].startswith("-") and not words[at].startswith("-") and os.path.isfile(words[at])


def _given_as(file: str) -> list[str]:
    """The option for a file that was given without one: data by their suffix, else a recipe."""
    if suffix_of(Path(file)) in LOADERS:
        return ["--set", f"data.sources.0.path={file}"]
    return ["-r", file]


def _with_files(words: list[str]) -> list[str]:
    """With `-p` and `-r` where no profile or recipe is given: the user's own, else the demo's."""
    if "--run-spec" in words:
        return words
    from engine.checks.machine import own_profile, own_recipe

    if not _gives_profile(words) and words[0] != "data":
        words = [*words, "-p", own_profile() or "demo"]
    return words if _gives_recipe(words) else [*words, "-r", own_recipe() or "demo"]


def _scores_a_model(words: Sequence[str]) -> bool:
    """Whether it is an `eval` with a profile or a recipe, which then takes both."""
    return words[0] == "eval" and (_gives_profile(words) or _gives_recipe(words))


def _gives_profile(words: Sequence[str]) -> bool:
    return any(word in ("-p", "--profile") or word.startswith("--profile=") for word in words)


def _gives_recipe(words: Sequence[str]) -> bool:
    return any(word in ("-r", "--recipe") or word.startswith("--recipe=") for word in words)
