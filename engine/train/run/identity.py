"""What a run trains on and with, compared with the checkpoint on a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.launch.changed_keys import find_changes, refused_changes

if TYPE_CHECKING:
    from engine.config.schema.recipe import Recipe


@dataclass(frozen=True)
class Identity:
    """What a step learns from, which must be unchanged on a resume: a run must not silently train something else."""

    data_fingerprint: str
    tokenizer_hash: str
    seed: int
    recipe: dict[str, Any]
    """The recipe as JSON."""

    @classmethod
    def of(cls, recipe: Recipe, data_fingerprint: str, tokenizer_hash: str) -> Identity:
        return cls(data_fingerprint, tokenizer_hash, recipe.train.seed, recipe.model_dump(mode="json", by_alias=True))

    def check(self, saved: dict[str, Any]) -> None:
        """Raise UsageError if the checkpoint was made from other data, another tokenizer or seed, or with a recipe that
        differs in a key that a resume may not change."""
        # A key that is newer than the checkpoint counts as unchanged.
        learned_from = _with_newer_keys(saved.get("recipe", {}), self.recipe)
        changes = find_changes(learned_from, self.recipe, "recipe")
        if refused := refused_changes(changes):
            raise UsageError(
                "run.toml differs from the settings that the checkpoint was trained with:\n  " + "\n  ".join(refused),
                fix="restore these keys in run.toml, or start a new run with: tunedeck train --run-spec run.toml",
            )
        names = {"data_fingerprint": "data", "tokenizer_hash": "tokenizer", "seed": "train.seed"}
        changed = [name for key, name in names.items() if saved.get(key) != getattr(self, key)]
        if changed:
            raise UsageError(
                f"the checkpoint was made with different {' and '.join(changed)}",
                expected="the same data, tokenizer and seed as at the start of the run",
                fix='restore the files, or start a new run with model.id = "run:..."',
            )


def _with_newer_keys(saved: Any, now: Any) -> Any:
    """`saved` with the keys that only `now` has, also in the tables of lists, such as sources."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return {
            **now,
            **{key: _with_newer_keys(value, now[key]) if key in now else value for key, value in saved.items()},
        }
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_with_newer_keys(*pair) for pair in zip(saved, now, strict=True)]
    return saved
