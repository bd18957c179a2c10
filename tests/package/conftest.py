"""The built wheel and an environment it is installed in, made once for all tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USER_FILES = (
    "profiles/hardware/mine.toml",
    "profiles/recipes/mine.toml",
    "runs/20261120T205800Z-demo/run.toml",
    "data/train.jsonl",
    "merged/model.safetensors",
    ".venv/lib/python3.11/site-packages/torch/__init__.py",
    "another-venv/lib/python3.11/site-packages/torch/__init__.py",
    "engine/__pycache__/cli.cpython-311.pyc",
    "tests/__pycache__/conftest.cpython-311.pyc",
    ".mypy_cache/3.11/engine.json",
    "notes.txt",
    "mine.toml",
)
"""What lies about in a checkout that somebody works in."""


@dataclass(frozen=True)
class Distributions:
    """The sdist and the wheel, built in a checkout with USER_FILES in it."""

    checkout: Path
    sdist: Path
    wheel: Path

    @property
    def metadata_folder(self) -> str:
        """The folder beside the package in the wheel, which has the version in its name."""
        return f"tunedeck-{self.wheel.name.split('-')[1]}.dist-info"


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel in it and nothing of the checkout."""

    python: Path
    command: Path
    site_packages: Path


def tracked_files() -> list[str]:
    """Paths of the repository, relative to its root. Without git: all files, as in an unpacked sdist."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in files if not path.parts[0].startswith(".") and "__pycache__" not in path.parts]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build the sdist and the wheel with the build backend, as pip does."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in tracked_files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, checkout / name)
    for name in USER_FILES:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    target = tmp_path_factory.mktemp("distributions")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", target], cwd=checkout, check=True)
    return Distributions(checkout, next(target.glob("*.tar.gz")), next(target.glob("*.whl")))


@pytest.fixture(scope="session")
def installation(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel installed in a new environment. A .pth file adds the packages of the environment that runs the tests,
    except its editable installs: Python does not read .pth files in a folder that a .pth file adds."""
    return install(distributions.wheel, tmp_path_factory.mktemp("installation"), Path(sysconfig.get_path("purelib")))


def install(wheel: Path, folder: Path, dependencies: Path) -> Installation:
    """Install the wheel into a new environment in `folder`, in which a .pth file adds the packages of the folder
    `dependencies`."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    site_packages = Path(found.stdout.strip())
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return Installation(python, folder / "bin" / "tunedeck", site_packages)
