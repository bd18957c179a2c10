"""Small chat templates that behave as those of widely used model families do, in the byte tokenizer's special tokens.

What each family does to a conversation:

| template | behaves as | what it does |
| --- | --- | --- |
| THINKING | Qwen3, GLM-4.5 | thinking of earlier turns is removed; the last turn has a thinking block, maybe empty |
| MARKED_THINKING | LFM2.5 | the same, with {% generation %} blocks |
| END_OF_TEXT | Phi-3 | the text ends with end-of-sequence, behind the end of its last turn |
| MARKED_END_OF_TEXT | Phi-3 | the same, with {% generation %} blocks |
| END_OF_TURNS | gpt-oss | the text before the end of the last turn; an earlier turn ends with <end> |
| PREFILLED | DeepSeek-R1 and distils, QwQ | the prompt starts the thinking, and a finished turn has none |
| CLOSED | Gemma 4 31B | the prompt has an empty thinking block, and a finished turn has none |
| SWITCHED | Qwen3.5, Nemotron 3 | the prompt starts the thinking, or with `enable_thinking = false` ends it |
| ANALYSIS | gpt-oss | the thinking before a tool call is removed when the final answer follows |
| PARTS | SmolVLM, Idefics3, LLaVA | content is a list of parts; a text has no part, and nothing of it is shown |
| TEXT_ARGUMENTS | DeepSeek-V3 | arguments are concatenated as JSON text, and calls are shown only if content is null |
| OBJECT_ARGUMENTS | GLM-4.5, Qwen3.5, Nemotron 3 | arguments are read as an object |
| NESTED_ARGUMENTS | Llama 3.1, Qwen2.5 | arguments go through `tojson`, which quotes JSON text once more |
"""

from __future__ import annotations

_CONTENT = "{% set text = m['content'].split('</think>')[-1].lstrip('\n') %}"
_THOUGHT = (
    "{% set thought = m.get('reasoning_content') or (m['content'].split('</think>')[0].split('<think>')[-1] "
    "if '</think>' in m['content'] else '') %}"
)
_THINKING_TURN = (
    "{% if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ text + '<end>' }}"
)
_OTHER = "{% else %}{{ '<user>' + m['content'] + '<end>' }}{% endif %}"
_PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"

THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>"
    + _CONTENT
    + _THOUGHT
    + _THINKING_TURN
    + _OTHER
    + "{% endfor %}"
    + _PROMPT
)
MARKED_THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>"
    + _CONTENT
    + _THOUGHT
    + "{% generation %}"
    + _THINKING_TURN
    + "{% endgeneration %}"
    + _OTHER
    + "{% endfor %}"
    + _PROMPT
)
END_OF_TEXT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}"
)
MARKED_END_OF_TEXT = END_OF_TEXT.replace(
    "{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}",
    "{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}{% else %}{{ m['content'] + '<end>' }}{% endif %}",
).replace("{% else %}{{ eos_token }}{% endif %}", "{% elif messages[-1]['role'] == 'user' %}{{ eos_token }}{% endif %}")
END_OF_TURNS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' and not loop.last %}<end>{% endif %}{% endfor %}"
)
PREFILLED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<assistant>' + m['content'].split('</think>')[-1] + '<end>' }}" + _OTHER + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
)
CLOSED = PREFILLED.replace("<assistant><think>\n", "<assistant><think></think>")
SWITCHED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    + _CONTENT
    + _THOUGHT
    + "{{ '<assistant><think>' + ('\n' + thought + '\n' if thought else '') + '</think>' + text + '<end>' }}"
    + _OTHER
    + "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
)
ANALYSIS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m.get('tool_calls') %}"
    "{% if m.get('reasoning_content') and loop.index0 > messages | length - 3 and messages[-1]['role'] != 'assistant' "
    "or loop.last %}{{ '<assistant>analysis ' + m['reasoning_content'] + '<end>' }}{% endif %}"
    "{{ '<assistant>call ' + m['tool_calls'][0]['function']['name'] + '<end>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<assistant>final ' + m['content'] + '<end>' }}"
    + _OTHER
    + "{% endfor %}"
    + _PROMPT
)
PARTS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<end>{% endfor %}" + _PROMPT
)
_CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% if m['content'] is not none %}"
    "{{ m['content'] }}{% endif %}SHOWN<end>" + _OTHER + "{% endfor %}" + _PROMPT
)
TEXT_ARGUMENTS = _CALLS.replace(
    "SHOWN",
    "{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}{% endif %}",
)
OBJECT_ARGUMENTS = _CALLS.replace(
    "SHOWN",
    "{% for c in m.get('tool_calls', []) %}{{ c['function']['name'] }}"
    "{% for key, value in c['function']['arguments'] | items %}{{ ' ' + key + '=' + value | string }}{% endfor %}"
    "{% endfor %}",
)
NESTED_ARGUMENTS = _CALLS.replace(
    "SHOWN",
    "{% for c in m.get('tool_calls', []) %}{{ c['function']['name'] + ' ' + c['function']['arguments'] | tojson }}"
    "{% endfor %}",
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
