"""Loads the tokenizer of a run: the model's own, another one, or the built-in byte tokenizer.

The byte tokenizer needs no download, and is saved as an ordinary tokenizer folder. Samples are read in `engine.data`.

Try: `python -c "from engine.model.tokenizer import byte_tokenizer; print(byte_tokenizer()('née')['input_ids'])"`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import UsageError
from engine.model.hub import HUB_ERRORS, loading_error, require_reachable
from engine.model.reference import BUILTIN_PREFIX, RUN_PREFIX, find_run_weights
from engine.spec.schema.recipe import Model

BUILTIN_BYTES = "builtin:bytes"

BYTE_SPECIALS = ("<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>", "<end>", "<reserved>")
"""Special tokens of the byte tokenizer, with ids 256 to 263. The vocabulary of 264 is a multiple of 8, which matrix
units need for full speed. profiles/models/builtin-tiny.toml relies on 256 and 257 for bos and eos."""

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{% generation %}{{ message['content'] }}<end>{% endgeneration %}"
    "{% else %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load_tokenizer(model: Model, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe's [model], with a pad token and the recipe's chat template.

    Raises:
        UsageError: unknown built-in, a folder without a tokenizer, an unreadable chat template.
        EnvironmentProblem: the hub cannot be reached, or refuses access.
    """
    source = model.tokenizer or model.id
    if source == BUILTIN_BYTES or (source.startswith(BUILTIN_PREFIX) and model.tokenizer is None):
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    elif source.startswith(BUILTIN_PREFIX):
        raise UsageError(f"no built-in tokenizer {source!r}", expected=BUILTIN_BYTES, fix="set model.tokenizer to it")
    else:
        tokenizer = _pretrained(source, model.revision if source == model.id else None, trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = _template_text(model.chat_template)
    give_pad_token(tokenizer)
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Create the byte tokenizer: 256 byte tokens (id = byte value) and 8 special tokens. decode(encode(text)) == text
    for every text."""
    letters = _letter_of_each_byte()
    core = Tokenizer(models.BPE(vocab={letter: value for value, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        # Never produced. Beside a Qwen2 config, AutoTokenizer opens Qwen2Tokenizer, whatever tokenizer_config.json
        # says (transformers 5.23), and without an unk that class adds one with an id beyond the embedding.
        unk_token="<reserved>",
        additional_special_tokens=list(BYTE_SPECIALS[3:7]),
        chat_template=BYTE_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=2048,
    )


def give_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Choose a pad token for a tokenizer without one: unk, else eos.

    Padding is recognised by the attention mask and by labels of -100, never by its id, so with eos as padding the real
    eos is still a target of the loss.
    """
    if tokenizer.pad_token_id is not None:
        return
    substitute = tokenizer.unk_token or tokenizer.eos_token
    if substitute is None:
        raise UsageError(
            "the tokenizer has no pad, unk or eos token",
            expected="a tokenizer that can end and pad a sequence",
            fix="set model.tokenizer to one with an eos token",
        )
    tokenizer.pad_token = substitute


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, embedding_rows: int) -> None:
    """Raise UsageError if the tokenizer has token ids of `embedding_rows` (the number of rows of the model's embedding)
    or above: the model has no embedding for these."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= embedding_rows:
        raise UsageError(
            f"the tokenizer's largest token id is {largest}, but the model embeds only {embedding_rows} tokens",
            expected=f"ids below {embedding_rows}",
            fix="remove model.tokenizer to use the model's own, or choose a model made for this tokenizer",
        )


def _pretrained(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    where = str(find_run_weights(source)) if source.startswith(RUN_PREFIX) else source
    folder = Path(where).expanduser()
    if folder.is_dir():
        where = str(folder)
    require_reachable(where, "tokenizer", revision)
    opener = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
    try:
        return opener.from_pretrained(where, revision=revision or "main", trust_remote_code=trust_remote_code)
    except HUB_ERRORS as error:
        raise loading_error(error, where, "tokenizer") from error


def _is_generic(folder: Path) -> bool:
    """Whether a folder's tokenizer must be loaded as PreTrainedTokenizerFast, because its tokenizer_config.json names a
    generic class. AutoTokenizer would choose a class by the model type in config.json instead."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
    except ValueError as error:
        raise UsageError(f"{config} is not JSON: {error}", fix="restore the file") from error


def _template_text(template: str) -> str:
    """Return the content of the file if `template` is the path of a .jinja file, else `template` itself."""
    if not template.endswith(".jinja"):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the chat template {template}: {error}", fix="correct model.chat_template"
        ) from error


def _letter_of_each_byte() -> list[str]:
    """Return the character that represents each byte in ByteLevel (GPT-2's byte-to-unicode table): printable Latin-1
    characters represent themselves, other bytes are represented by characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (chr(code) for code in range(0x100, 0x200))
    return [chr(value) if value in printable else next(moved) for value in range(256)]
