"""Names of runs, profiles and recipes are completed by real shells, in what `--install-completion` writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BASH = """
source "$HOME/.bashrc"
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_tunedeck_completion tunedeck
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

ZSH = """
fpath+=~/.zfunc
autoload -Uz compinit && compinit -u -D
_arguments() {{ print -r -- "${{@[-1]}}" }}
words=({words}); CURRENT=${{#words}}
autoload -Uz +X _tunedeck 2>/dev/null; source ~/.zfunc/_tunedeck
_tunedeck_completion
"""

FISH = 'source ~/.config/fish/completions/tunedeck.fish; complete -C "{line}"'

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

COMPLETED = {
    "tunedeck show d": ["demo"],
    "tunedeck show 20261101": ["20261101T100000Z-demo"],
    "tunedeck show capitals/fi": ["capitals/first"],
    "tunedeck compare last cap": ["capitals"],
    "tunedeck rm --runs others el": ["elsewhere"],
    "tunedeck train -p mi": ["mine"],
    "tunedeck plan --profile 80": ["80gb"],
    "tunedeck eval --recipe qwen2-": ["qwen2-vl-detect"],
    "tunedeck profiles show mi": ["mine"],
    "tunedeck recipes show lo": ["lora"],
}


def write_run(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f'name = "{name}"\n')


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with runs, a profile, and a `tunedeck` on its path."""
    write_run(tmp_path / "runs" / "20261101T100000Z-demo", "demo")
    write_run(tmp_path / "runs" / "20261102T100000Z-demo-2", "demo")
    write_run(tmp_path / "runs" / "20261103T100000Z-capitals", "capitals")
    write_run(tmp_path / "runs" / "20261103T100000Z-capitals" / "stages" / "01-first", "capitals/first")
    write_run(tmp_path / "others" / "20261103T100000Z-elsewhere", "elsewhere")
    (tmp_path / "profiles" / "hardware").mkdir(parents=True)
    (tmp_path / "profiles" / "hardware" / "mine.toml").write_text("")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tunedeck"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{ROOT}/tunedeck.py" "$@"\n')
    command.chmod(0o755)
    return tmp_path


def in_shell(home: Path, *command: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TUNEDECK_", "XDG_"))}
    environment = {**kept, "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes_names(home: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    in_shell(home, shell, "-c", "tunedeck --install-completion; true")  # the shell that starts it is asked
    script = SCRIPTS[shell]
    for line, names in COMPLETED.items():
        shown = in_shell(home, shell, "-c", script.format(words=line, line=line))
        found = shown.strip().removeprefix("*: :((").removesuffix("))").replace('"', "").split()
        assert found == names, f"{shell}: {line}"


def test_before_anything_is_typed_the_short_names_are_enough(home: Path) -> None:
    words = {"COMP_WORDS": "tunedeck show ", "COMP_CWORD": "2", "_TUNEDECK_COMPLETE": "complete_bash"}
    shown = in_shell(home, "env", *(f"{name}={value}" for name, value in words.items()), "tunedeck")
    assert shown.split() == ["last", "capitals", "demo"]


def test_completing_imports_nothing_heavy(home: Path) -> None:
    script = (
        "import sys, tunedeck, atexit; sys.argv = ['tunedeck']\n"
        "heavy = ('torch', 'transformers', 'textual', 'rich')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules]))\n"
        "tunedeck.main()"
    )
    for line in ("tunedeck show d", "tunedeck train -p mi"):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_TUNEDECK_COMPLETE": "complete_bash"}
        environment = [f"{name}={value}" for name, value in {**words, "PYTHONPATH": str(ROOT)}.items()]
        assert in_shell(home, "env", *environment, sys.executable, "-c", script).endswith("[]\n")
