"""Module names of an imported recipe, kept where the model has them.

Other tools ignore a name that matches nothing as long as another name matches; here each pattern has to match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from engine.architecture.facts import Architecture
from engine.architecture.lookup import find_facts
from engine.architecture.parameters import adaptable_names, globs_of_parts, parameter_names
from engine.config.files.text import quoted
from engine.config.name_patterns import PARTS, matches, matches_end
from engine.config.schema.recipe import Model
from engine.errors import TunedeckError
from engine.extras.imports.draft import Draft


def keep_matching_names(draft: Draft) -> None:
    """Remove patterns of [method] that match nothing in the model, with an account of each.

    Does nothing where the model's config is not on this machine, or where no pattern would be left (method.freeze may
    be left without).
    """
    model = {key: value for key, value in draft.recipe.get("model", {}).items() if key in ("id", "revision")}
    try:
        arch = find_facts(Model(**model)).architecture
    except TunedeckError:
        return
    if arch is None:
        return
    _keep(draft, "targets", adaptable_names(arch), matches_end)
    _keep(draft, "exclude", adaptable_names(arch), matches_end)
    _keep(draft, "also_train", parameter_names(arch), matches)
    _keep(draft, "train_only", parameter_names(arch), matches)
    _keep(draft, "freeze", parameter_names(arch), partial(_freezes, arch))


def _freezes(arch: Architecture, pattern: str, name: str) -> bool:
    """Whether a pattern of method.freeze, or the name of a part of the model, matches a parameter."""
    if pattern in PARTS and pattern != "language" and arch.vision_encoder is None:
        return False
    return any(matches(glob, name) for glob in globs_of_parts([pattern], arch))


def _keep(draft: Draft, key: str, names: Sequence[str], test: Callable[[str, str], bool]) -> None:
    patterns = draft.get(f"method.{key}")
    if not isinstance(patterns, list):
        return
    kept = [pattern for pattern in patterns if any(test(pattern, name) for name in names)]
    dropped = [pattern for pattern in patterns if pattern not in kept]
    if dropped and (kept or key == "freeze"):
        draft.recipe["method"][key] = kept
        theirs = draft.origin.get(f"method.{key}", key)
        shown = ", ".join(map(quoted, dropped[:3])) + (f" and {len(dropped) - 3} more" if len(dropped) > 3 else "")
        draft.leave(f"{theirs} ({shown})", "these names match nothing in the model")
