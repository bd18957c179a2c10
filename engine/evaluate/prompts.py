"""Prompts of the user's own, answered at every evaluation: the same questions at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.budget.architecture.positions import table_of_positions
from engine.config.files.prompts import fixed_prompts
from engine.config.schema.recipe import Generate
from engine.config.schema.run import RunSpec
from engine.data.prompts import PromptTokens, was_trained_plain
from engine.errors import DataError
from engine.evaluate.answers import KeptAnswers, answer_first
from engine.evaluate.context import EvaluationContext
from engine.model.decoder import eval_mode
from engine.model.loaded import LoadedModel


@dataclass(frozen=True)
class FixedPrompts:
    """Prompts as tokens, rendered as the run's chat template does at inference; plain for a run on plain text."""

    texts: list[str]
    ids: list[list[int]]

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """(prompt, no reference)."""
        return self.ids[row], []

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        """None."""
        return {}


def load_fixed_prompts(spec: RunSpec, loaded: LoadedModel) -> FixedPrompts | None:
    """None without eval.prompts. Raises DataError for a prompt that is as long as the model's positions."""
    texts = fixed_prompts(spec.recipe.eval)
    if not texts:
        return None
    tokenizer = loaded.tokenizer
    plain = was_trained_plain(spec) or not tokenizer.chat_template
    tokens = PromptTokens("the run's model", tokenizer, spec, plain=plain, think=None)
    system = spec.recipe.data.system_prompt
    first = [{"role": "system", "content": system}] if system and not plain else []
    ids = [tokens.ids([*first, {"role": "user", "content": text}]) for text in texts]
    positions = table_of_positions(loaded.config.to_dict())
    longest = max(map(len, ids))
    if positions is not None and longest >= positions:
        raise DataError(
            f"eval.prompts: a prompt has {longest} tokens, and the model has {positions} positions",
            fix="shorten the prompt",
        )
    return FixedPrompts(texts, ids)


def settings_for(prompts: FixedPrompts, loaded: LoadedModel, settings: Generate) -> Generate:
    """With as many new tokens as the model has positions for behind the longest prompt."""
    positions = table_of_positions(loaded.config.to_dict())
    if positions is None:
        return settings
    room = positions - max(map(len, prompts.ids))
    return settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, room)})


def answer_prompts(context: EvaluationContext, prompts: FixedPrompts) -> list[dict[str, str]]:
    """(prompt, answer) of each. Raises as `answer_first` does."""
    with eval_mode(context.loaded.model):
        answers = answer_first(context, prompts, len(prompts.texts), KeptAnswers())
    return [{"prompt": text, "answer": answer["answer"]} for text, answer in zip(prompts.texts, answers, strict=True)]
