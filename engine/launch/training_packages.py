"""Checks that the packages that training needs are installed.

`pip install tunedeck` installs the console and the commands that plan, which do without these packages;
`tunedeck[train]` adds them. Code that needs them calls `require_training_packages` first, so that a user reads one
sentence and no run directory is created.

Try: `python -c "from engine.launch.training_packages import missing_packages; print(missing_packages())"`
"""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import EnvironmentProblem

TRAINING_PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors")
"""The packages that `tunedeck[train]` installs in addition."""

INSTALL_COMMAND = "pip install 'tunedeck[train]'"
"""The command that installs TRAINING_PACKAGES."""


def missing_packages() -> list[str]:
    """List the packages that training needs and that are not installed. Imports none of them."""
    return [name for name in TRAINING_PACKAGES if find_spec(name) is None]


def require_training_packages() -> None:
    """Raise EnvironmentProblem if a package that training needs is not installed."""
    missing = missing_packages()
    if missing:
        raise EnvironmentProblem(
            f"this needs {', '.join(missing)}, which a light installation of Tunedeck leaves out", fix=INSTALL_COMMAND
        )
