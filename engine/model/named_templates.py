"""Chat templates by name, for base models, whose tokenizers have none: the layouts that instruction-tuned models of
their families use. A name fits where the vocabulary has its tokens, so that each of its marks is one token."""

from __future__ import annotations

import json
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from engine.errors import UsageError


class NamedTemplate(NamedTuple):
    """A chat template, and the tokens that it needs."""

    tokens: tuple[str, ...]
    text: str


def _turns(before: str, between: str, behind: str) -> str:
    """Every turn alike: its role, its text, and what stands around them."""
    turn = f"{{{{ '{before}' + message['role'] + '{between}' + message['content'] | trim + '{behind}' }}}}"
    return "{% for message in messages %}" + turn + "{% endfor %}"


def _prompt(text: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


_NO_SYSTEM = "{{ raise_exception('this chat template has no system turn') }}"

NAMED: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(
        ("<|im_start|>", "<|im_end|>"),
        _turns("<|im_start|>", "\\n", "<|im_end|>\\n") + _prompt("<|im_start|>assistant\\n"),
    ),
    "llama3": NamedTemplate(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ bos_token }}"
        + _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>")
        + _prompt("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    ),
    "gemma": NamedTemplate(
        ("<start_of_turn>", "<end_of_turn>"),
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}" + _NO_SYSTEM + "{% endif %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' "
        "+ message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}" + _prompt("<start_of_turn>model\\n"),
    ),
    "phi3": NamedTemplate(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        _turns("<|", "|>\\n", "<|end|>\\n") + _prompt("<|assistant|>\\n"),
    ),
    "mistral": NamedTemplate(
        ("[INST]", "[/INST]"),
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ message['content'] | trim + eos_token }}{% elif message['role'] == 'user' %}"
        "{{ '[INST]' + message['content'] | trim + '[/INST]' }}{% else %}" + _NO_SYSTEM + "{% endif %}{% endfor %}",
    ),
    "plain": NamedTemplate(
        (),
        "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] | trim }}"
        "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}" + _prompt("Assistant: "),
    ),
}
"""By the name that `model.chat_template` takes. "plain" needs no token but the end of sequence."""


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a named template. Raises UsageError where the vocabulary lacks a token of it."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in NAMED[name].tokens if token not in vocabulary]
    if missing:
        fitting = [other for other, each in NAMED.items() if all(token in vocabulary for token in each.tokens)]
        added = f"--set 'model.add_tokens={json.dumps(missing)}'"
        raise UsageError(
            f'model.chat_template = "{name}": the tokenizer does not have the tokens {", ".join(missing)}',
            expected=f"a template whose tokens exist: {', '.join(fitting)}",
            fix=f"add --set model.chat_template={fitting[0]}, or {added} to train them",
        )
    return NAMED[name].text
