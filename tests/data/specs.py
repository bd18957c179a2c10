"""Run specs and tokenizers for the tests of data and models."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.model.tokenizer import byte_tokenizer

PROFILE = Profile.model_validate({"name": "here", "device": {"kind": "cpu", "memory_gib": 1.0}})

CHATML = (
    "{% for m in messages %}{{ '<user>' + m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<user>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<system>' + m['role'] + '<reserved>\n\n' + m['content'] | trim + '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<system>assistant<reserved>\n\n' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<user>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ 'hmm ' }}{% endif %}{{ m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)
"""Rewrites earlier turns once the conversation goes on, as templates that strip thoughts do."""
PLAIN = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def run_spec(data: dict[str, Any], *, model: dict[str, Any] | None = None, **tables: Any) -> RunSpec:
    """A run spec around one [data] table."""
    recipe = {"name": "test", "model": {"id": "builtin:tiny", **(model or {})}, "data": data, **tables}
    return RunSpec(name="test", profile=PROFILE, recipe=Recipe.model_validate(recipe))


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """The byte tokenizer; `template`, if given, replaces its chat template, and "" removes it."""
    made = byte_tokenizer()
    if template is not None:
        made.chat_template = template or None
    return made
