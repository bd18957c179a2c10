"""Rules of preference learning (method.objective = "dpo" and the table [preference]) across the keys of a recipe."""

from __future__ import annotations

from engine.config.files.document import Place, Problem, Problems
from engine.config.files.text import quoted
from engine.config.schema.data import PREFERENCE_FORMATS, UNPAIRED_FORMATS
from engine.config.schema.preference import Preference
from engine.config.schema.recipe import Recipe
from engine.errors import UsageError

DPO = 'method.objective = "dpo"'
CONTINUED = "a continued adapter, which is the reference"


def preferences_are_learned(recipe: Recipe) -> Problems:
    """The table [preference] does nothing without its objective."""
    if recipe.learns_preferences:
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
    only = {
        "margin": ("simpo",),
        "label_smoothing": ("dpo",),
        "reference": ("dpo", "ipo", "kto"),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "length_normalised": ("dpo", "ipo", "simpo", "orpo"),
    }
    for key, losses in only.items():
        if getattr(asked, key) != getattr(default, key) and asked.loss not in losses:
            yield Problem(
                ("preference", key),
                f"{quoted(getattr(asked, key))} with preference.loss = {quoted(asked.loss)}",
                f"preference.loss = {' or '.join(map(quoted, losses))} is needed",
                (("preference", "loss"),),
            )


def reference_is_there(recipe: Recipe) -> Problems:
    if not recipe.learns_preferences or recipe.preference.reference != "adapter_off":
        return
    if recipe.method.kind == "full" or recipe.model.adapter is not None:
        found = "full fine-tuning" if recipe.method.kind == "full" else CONTINUED
        yield Problem(("preference", "reference"), f'"adapter_off" with {found}', '"precomputed" or "auto" is allowed')


def no_adapter_to_switch_off(found: str, stage: str = "") -> UsageError:
    """For what only the files of a model tell: its reference is not the model without the adapter. `stage`: its name in
    a recipe with stages."""
    table = f"stages.{stage}." if stage else ""
    return UsageError(
        f'preference.reference = "adapter_off" with {found}',
        expected="a model that equals the starting model without its adapter",
        fix=f"add --set {table}preference.reference=precomputed",
    )


def answers_for_the_divergence(recipe: Recipe) -> Problems:
    """KTO compares prompts with the answers of other samples of a step."""
    if recipe.learns_preferences and not recipe.learns_pairs and recipe.train.batch_size < 2:
        yield Problem(
            ("train", "batch_size"),
            f'{recipe.train.batch_size} with preference.loss = "kto", which pairs prompts with other answers',
            "2 or more is allowed",
        )


def answers_are_learned_as_they_are(recipe: Recipe) -> Problems:
    """What would change an answer's log-probability, or has no meaning for it."""
    if not recipe.learns_preferences:
        return
    found: list[tuple[Place, object, object]] = [
        (("data", "packing"), recipe.data.packing, False),
        (("data", "mixing"), recipe.data.mixing, "weights"),
        (("train", "label_smoothing"), recipe.train.label_smoothing, 0.0),
        (("method", "dropout"), recipe.method.dropout, 0.0),
        (("eval", "samples"), recipe.eval.samples, 0),
        (("backoff", "allow_learning_changes"), recipe.backoff.allow_learning_changes, []),
    ]
    for place, value, allowed in found:
        if value != allowed:
            yield Problem(place, f"{quoted(value)} with {DPO}", f"{quoted(allowed)} is allowed")
    if recipe.data.loss_on == "all":
        yield Problem(("data", "loss_on"), f'"all" with {DPO}', "only answers have preferences: leave it out")
    if set(recipe.eval.metrics) - {"loss"}:
        yield Problem(
            ("eval", "metrics"), f"{quoted(recipe.eval.metrics)} with {DPO}", '["loss"], which includes the rewards'
        )


def rows_have_preferences(recipe: Recipe) -> Problems:
    if not recipe.learns_preferences:
        return
    formats: tuple[str, ...] = PREFERENCE_FORMATS
    asked, beside = DPO, ("method", "objective")
    words = '"preference", or "image-preference": rows with chosen and rejected, optionally prompt'
    if not recipe.learns_pairs:
        formats, asked, beside = UNPAIRED_FORMATS, 'preference.loss = "kto"', ("preference", "loss")
        words = (
            '"unpaired-preference", or "image-unpaired-preference": rows with prompt, completion and label; or pairs'
        )
    for kind in ("sources", "validation"):
        for number, source in enumerate(getattr(recipe.data, kind)):
            if source.format not in ("auto", *formats):
                found = f"{quoted(source.format)} with {asked}"
                yield Problem(("data", kind, number, "format"), found, words, (beside,))


PREFERENCE_RULES = (
    preferences_are_learned,
    preference_keys_of_the_loss,
    reference_is_there,
    answers_for_the_divergence,
    answers_are_learned_as_they_are,
    rows_have_preferences,
)
