"""Rules of preference learning (method.objective = "dpo" and the table [preference]) across the keys of a recipe."""

from __future__ import annotations

from engine.config.files.document import Place, Problem, Problems
from engine.config.files.text import quoted
from engine.config.schema.data import PREFERENCE_FORMATS
from engine.config.schema.preference import Preference
from engine.config.schema.recipe import Recipe

DPO = 'method.objective = "dpo"'


def preferences_are_learned(recipe: Recipe) -> Problems:
    """The table [preference] does nothing without its objective."""
    if recipe.learns_pairs:
        return
    for key, value in recipe.preference.model_dump().items():
        if value != getattr(Preference(), key):
            yield Problem(
                ("preference", key),
                f'{quoted(value)} with method.objective = "sft"',
                f"{DPO} is needed",
                (("method", "objective"),),
            )


def preference_keys_of_the_loss(recipe: Recipe) -> Problems:
    asked, default = recipe.preference, Preference()
    only = {"margin": ("simpo",), "label_smoothing": ("dpo",), "reference": ("dpo", "ipo")}
    for key, losses in only.items():
        if getattr(asked, key) != getattr(default, key) and asked.loss not in losses:
            yield Problem(
                ("preference", key),
                f"{quoted(getattr(asked, key))} with preference.loss = {quoted(asked.loss)}",
                f"preference.loss = {' or '.join(map(quoted, losses))} is needed",
                (("preference", "loss"),),
            )


def reference_is_there(recipe: Recipe) -> Problems:
    if not recipe.learns_pairs or recipe.preference.reference != "adapter_off":
        return
    if recipe.method.kind == "full" or recipe.model.adapter is not None:
        found = (
            "a full fine-tuning" if recipe.method.kind == "full" else "an adapter that goes on, which is the reference"
        )
        yield Problem(("preference", "reference"), f'"adapter_off" with {found}', '"precomputed" or "auto" is allowed')


def pairs_are_learned_as_they_are(recipe: Recipe) -> Problems:
    """What would change a pair's log-probabilities, or has no meaning for them."""
    if not recipe.learns_pairs:
        return
    found: list[tuple[Place, object, object]] = [
        (("data", "packing"), recipe.data.packing, False),
        (("train", "label_smoothing"), recipe.train.label_smoothing, 0.0),
        (("method", "dropout"), recipe.method.dropout, 0.0),
        (("eval", "samples"), recipe.eval.samples, 0),
    ]
    for place, value, allowed in found:
        if value != allowed:
            yield Problem(place, f"{quoted(value)} with {DPO}", f"{quoted(allowed)} is allowed")
    if recipe.data.loss_on == "all":
        yield Problem(("data", "loss_on"), f'"all" with {DPO}', "only answers have a preference: leave it out")
    if set(recipe.eval.metrics) - {"loss"}:
        yield Problem(
            ("eval", "metrics"), f"{quoted(recipe.eval.metrics)} with {DPO}", '["loss"], which brings the rewards too'
        )
    for kind in ("sources", "validation"):
        for number, source in enumerate(getattr(recipe.data, kind)):
            if source.format not in ("auto", *PREFERENCE_FORMATS):
                yield Problem(
                    ("data", kind, number, "format"),
                    f"{quoted(source.format)} with {DPO}",
                    '"preference", or "image-preference": rows with chosen and rejected, and perhaps a prompt',
                    (("method", "objective"),),
                )


PREFERENCE_RULES = (
    preferences_are_learned,
    preference_keys_of_the_loss,
    reference_is_there,
    pairs_are_learned_as_they_are,
)
