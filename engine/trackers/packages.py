"""The available trackers, and a check that their packages are installed before a run starts."""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import EnvironmentProblem
from engine.spec.schema.recipe import Recipe


def missing_trackers(recipe: Recipe) -> list[str]:
    """Return the names of a recipe's trackers whose packages are not installed. Imports none of the packages."""
    return [name for name in recipe.trackers.use if find_spec(name) is None]


def install_command(names: list[str]) -> str:
    """Return the shell command that installs the packages of the trackers `names`."""
    return f"pip install {' '.join(names)}"


def require_trackers(recipe: Recipe) -> None:
    """Raise EnvironmentProblem if the package of one of the recipe's trackers is not installed."""
    if missing := missing_trackers(recipe):
        raise EnvironmentProblem(
            f"trackers.use: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            fix=f"{install_command(missing)}; or train without: --set trackers.use=[]",
        )
