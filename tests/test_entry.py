"""The start of the `tunedeck` command: which modules it imports, and that it never imports a user's own `engine.py` in
place of the project's."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import engine.budget
import engine.commands
import engine.config
import engine.journal
import engine.launch

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "textual")

LIGHT_MODULES = sorted(
    ["engine.errors", "engine.cli"]
    + [
        module.name
        for package in (engine.config, engine.budget, engine.journal, engine.launch, engine.commands)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
)

PROBE = """
import importlib, sys
heavy = {heavy!r}
for name in {names!r}:
    importlib.import_module(name)
    loaded = [module for module in heavy if module in sys.modules]
    if loaded:
        sys.exit(f"{{name}} imports {{loaded}}")
"""


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_no_light_module_imports_a_heavy_package() -> None:
    """One new interpreter imports all light modules; the first one that imports a heavy package is named."""
    done = python("-c", PROBE.format(heavy=HEAVY, names=LIGHT_MODULES))
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_heavy_nor_pydantic() -> None:
    script = (
        "import sys, runpy\nsys.argv = ['tunedeck', '--help']\n"
        "try:\n    import tunedeck; tunedeck.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('LOADED', [name for name in {(*HEAVY, 'pydantic', 'rich.live')!r} if name in sys.modules])"
    )
    done = python("-c", script)
    assert done.stdout.splitlines()[-1] == "LOADED []", done.stderr


def test_the_first_screen_imports_nothing_that_starts_runs() -> None:
    script = (
        "import sys, tui.app, tui.screens.launch\n"
        "print([name for name in sys.modules if name.startswith(('engine.launch.', 'engine.journal.summary'))])"
    )
    done = python("-c", script)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_version_is_the_distributions() -> None:
    assert python(str(ROOT / "tunedeck.py"), "--version").stdout == f"tunedeck {version('tunedeck')}\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder like a user's repository, with modules that have the names of our packages; importing any of them ends
    the process."""
    for name in ("engine", "profiles", "tui"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the stranger was imported')\n")
    return tmp_path


@pytest.mark.parametrize("pythonpath", ["", "."])
@pytest.mark.parametrize(
    "entry", [[str(ROOT / "tunedeck.py")], ["-m", "tunedeck"], ["-c", "import tunedeck; tunedeck.main()"]]
)
def test_a_users_own_engine_module_changes_nothing(hostile: Path, entry: list[str], pythonpath: str) -> None:
    path = pythonpath if entry[0] not in ("-m", "-c") else os.pathsep.join(filter(None, [pythonpath, str(ROOT)]))
    done = python(*entry, "runs", "--json", cwd=hostile, PYTHONPATH=path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


START = """
import sys
sys.path.insert(0, {root!r})
from importlib.metadata import version
from pathlib import Path
from engine.journal.directory import RunDirectory
from engine.launch.process import start_engine
sys.exit(start_engine(RunDirectory(Path(sys.argv[1]))).wait())
"""


@pytest.mark.parametrize("pythonpath", ["", "."])
def test_a_users_own_engine_module_changes_nothing_in_the_engine_process(hostile: Path, pythonpath: str) -> None:
    """The run has no run.toml. Only the project's own engine process can report this in the log."""
    run = hostile / "run"
    run.mkdir()
    done = python("-P", "-c", START.format(root=str(ROOT)), str(run), cwd=hostile, PYTHONPATH=pythonpath)
    log = (run / "engine.log").read_text()
    assert done.returncode == 6, done.stderr + log
    assert "is not a run directory" in log and "stranger" not in log


def test_a_process_pool_of_the_engine_process_finds_our_packages(hostile: Path) -> None:
    """Workers that are spawned inherit the parent's import path, in which our folder comes before the working
    directory."""
    script = hostile / "main.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport tunedeck; tunedeck._own_packages_first()\n"
        "import multiprocessing, engine.errors\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(engine.errors.TunedeckError, ('ok',)).found)\n"
    )
    done = python("-P", str(script), cwd=hostile, PYTHONPATH=".", PYTHONSAFEPATH="1")
    assert done.stdout.strip() == "ok", done.stderr
