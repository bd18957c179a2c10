"""Loads what turns data into a model's inputs: the tokenizer, and the image processor."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto import processing_auto
from transformers.utils import GENERATION_CONFIG_NAME as GENERATION_CONFIG
from transformers.utils.hub import cached_file

from engine.architecture.lookup import added_tokens
from engine.architecture.token_rows import BYTE_SPECIALS
from engine.config.check.data_rules import image_key
from engine.config.files.find import BUILTIN_PREFIX, RUN_PREFIX
from engine.config.files.machine import install_command, path_of
from engine.config.schema.data import Data
from engine.config.schema.recipe import Model
from engine.config.schema.run import RunSpec
from engine.data.end_tokens import set_model_ends
from engine.data.images import ImageProcessor
from engine.data.own_processor import OwnProcessor, PixtralProcessor, SmolVLMProcessor
from engine.errors import EnvironmentProblem, UsageError
from engine.model.config import (
    HUB_ERRORS,
    PROCESSOR_FILES,
    load_config,
    loading_error,
    processor_files,
    require_reachable,
)
from engine.model.named_templates import NAMED, named_template
from engine.model.reference import StartingWeights, find_run_weights, find_starting_weights
from engine.model.tokenizer_patterns import require_bounded_expressions

PREPROCESSOR, PROCESSOR, _ = PROCESSOR_FILES

PATCH_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Model types that take images of any size as patches, and that have a memory formula."""

SQUARE_MODELS = ("gemma3",)
"""Model types whose images are all resized to one size, and that have a memory formula. Images of all other
types are what their own processor makes of them."""


def load_chat_processor(spec: RunSpec, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Also for a recipe without images, if the model has a vision encoder; None for all other models. Raises as
    `load_image_processor` does."""
    config = load_config(find_starting_weights(spec.recipe.model), spec.limits.trust_remote_code)
    return _processor_of(spec, config, tokenizer, "the chat") if hasattr(config, "vision_config") else None


def load_image_processor(spec: RunSpec, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """None for a recipe without images. UsageError: the model takes no images, or has no settings for its processor.
    EnvironmentProblem: Pillow is not installed, or the hub cannot be reached."""
    key = image_key(spec.recipe)
    if key is None:
        return None
    config = load_config(find_starting_weights(spec.recipe.model), spec.limits.trust_remote_code)
    return _processor_of(spec, config, tokenizer, key)


def _processor_of(
    spec: RunSpec, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> ImageProcessor:
    """`key`: what needs images."""
    if importlib.util.find_spec("PIL") is None:
        raise EnvironmentProblem(f"{key}: Pillow is not installed", fix=install_command("vision", ["pillow"]))
    start = find_starting_weights(spec.recipe.model)
    if config.model_type in (*PATCH_MODELS, *SQUARE_MODELS):
        return _described(_image_processor(spec, start, config), config, tokenizer)
    return _own_processor(spec, start, config, tokenizer)


def _image_processor(spec: RunSpec, start: StartingWeights, config: PreTrainedConfig) -> Any:
    """transformers' image processor, with the recipe's bounds of pixels for images of any size."""
    options: dict[str, Any] = {"backend": "pil", "revision": start.revision or "main"}
    try:
        processor = AutoImageProcessor.from_pretrained(start.base, **options)
    except HUB_ERRORS as error:
        raise loading_error(error, start.base, "image processor") from error
    _bound_pixels(processor, spec.recipe.data, config)
    return processor


def _bound_pixels(processor: Any, data: Data, config: PreTrainedConfig) -> None:
    """Set the recipe's bounds of pixels. UsageError: the processor has none, because it resizes to sides."""
    bounds = {"shortest_edge": data.image_min_pixels, "longest_edge": data.image_max_pixels}
    given = {edge: pixels for edge, pixels in bounds.items() if pixels is not None}
    if not given or config.model_type in SQUARE_MODELS:
        return
    size = dict(processor.size)
    # In processors with a grid of merged patches the edges are areas; elsewhere they are sides.
    if not hasattr(processor, "merge_size") or not {"shortest_edge", "longest_edge"} <= size.keys():
        raise UsageError(
            f"data.image_min_pixels and data.image_max_pixels have no effect for a {config.model_type} model: "
            f"its processor resizes images to {size}",
            fix="remove both keys",
        )
    processor.size = {**size, **given}


def _own_processor(
    spec: RunSpec, start: StartingWeights, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> OwnProcessor:
    """The model's own processor without its parts for video and sound, which need further packages."""
    revision = start.revision or "main"
    try:
        stated, _ = ProcessorMixin.get_processor_dict(start.base, revision=revision)
        names: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
        kind = _processor_class(stated.get("processor_class") or names.get(config.model_type), config)
        images = _image_processor(spec, start, config)
    except HUB_ERRORS as error:
        raise loading_error(error, start.base, "image processor") from error
    files = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in processor_files(start.base, revision)}
    for content in (files.get(PREPROCESSOR), files.get(PROCESSOR, {}).get("image_processor")):
        if content is not None and images.size is not None:
            content["size"] = dict(images.size)
    if tokenizer.chat_template is None and isinstance(stated.get("chat_template"), str):
        tokenizer.chat_template = stated["chat_template"]
    return OwnProcessor.of(kind, stated, images, copy.deepcopy(tokenizer), files)


def _processor_class(name: str | None, config: PreTrainedConfig) -> Any:
    """UsageError: transformers has no processor for this model that runs with what is installed."""
    own = {"PixtralProcessor": PixtralProcessor, "SmolVLMProcessor": SmolVLMProcessor}
    if name in own:  # transformers' own need torchvision, or a package for videos
        return own[name]
    found = None if name is None else processing_auto.processor_class_from_name(name)
    if found is None:
        raise UsageError(
            f"images are not supported for {config.model_type} models: transformers has no processor "
            f"{name or 'for them'}",
            expected="a model with a processor for images and text",
            fix="choose another model.id, or train on text: remove the sources with images",
        )
    return found


def _described(processor: Any, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    """Source of the image tokens: transformers 5.23, processing_qwen2_vl.py and processing_gemma3.py."""
    facts: Any = config
    if config.model_type in PATCH_MODELS:
        return ImageProcessor(
            processor, "patches", int(facts.image_token_id), int(processor.merge_size), int(processor.patch_size)
        )
    begin, part, end = (
        str(tokenizer.convert_ids_to_tokens(int(number)))
        for number in (facts.boi_token_index, facts.image_token_id, facts.eoi_token_index)
    )
    tokens, side = int(facts.mm_tokens_per_image), int(facts.vision_config.patch_size)
    merge = int(facts.vision_config.image_size) // side // int(tokens**0.5)
    written = begin, f"\n\n{begin}{part}{end}\n\n"
    return ImageProcessor(processor, "squares", int(facts.image_token_id), merge, side, tokens, written)


LARGEST_ID = 2**31 - 1
"""Of a token, as tokenizers holds it."""

BUILTIN_BYTES = "builtin:bytes"

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

    UsageError: unknown built-in, a folder without a tokenizer, an unreadable chat template. EnvironmentProblem: the hub
    cannot be reached, or refuses access.
    """
    source = model.tokenizer or model.id
    if source == BUILTIN_BYTES or (source.startswith(BUILTIN_PREFIX) and model.tokenizer is None):
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    elif source.startswith(BUILTIN_PREFIX):
        raise UsageError(f"no built-in tokenizer {source!r}", expected=BUILTIN_BYTES, fix="set model.tokenizer to it")
    else:
        tokenizer = _pretrained(source, model.revision if source == model.id else None, trust_remote_code)
    if model.tokenizer is None:
        set_model_ends(tokenizer, _ends_of_model(model))
    _add_tokens(tokenizer, added_tokens(model), model.chat_template)
    for special, token in model.special_tokens.items():
        _set_special(tokenizer, special, token)
    if model.chat_template is not None:
        name = model.chat_template
        tokenizer.chat_template = named_template(name, tokenizer) if name in NAMED else _template_text(name)
    give_pad_token(tokenizer)
    # Rows beyond data.max_length are cut or dropped, and counted; the warning tells of errors that do not come.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _ends_of_model(model: Model) -> list[int]:
    """The end tokens that the base's generation_config.json names; none where it has no such file.

    UsageError: the file cannot be read. EnvironmentProblem: it is not on this machine and the hub cannot be reached.
    """
    start = find_starting_weights(model)
    if start.base.startswith(BUILTIN_PREFIX):
        return []
    name, revision = GENERATION_CONFIG, start.revision or "main"
    try:
        # For a folder, too; it raises no error where there is no such file, or no connection to look for it.
        file = cached_file(start.base, name, revision=revision, _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)  # fmt: skip
        named = None if file is None else json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    except HUB_ERRORS as error:
        raise loading_error(error, start.base, name) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{name} of {start.base} is not a JSON object: {error}", fix="restore the file") from error
    named = named if isinstance(named, list) else [named]
    return [token for token in named if isinstance(token, int) and 0 <= token <= LARGEST_ID]


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[str], template: str | None) -> None:
    """Add those of `tokens` that the vocabulary lacks. What the chat template writes becomes a special token, which
    can end an answer and is left out of texts."""
    if template is None:
        written = str(tokenizer.chat_template or "")
    elif template in NAMED:
        written = NAMED[template].text + "".join(NAMED[template].tokens)
    else:
        written = _template_text(template)
    vocabulary = tokenizer.get_vocab()
    for special in (True, False):
        new = [token for token in tokens if token not in vocabulary and (token in written) == special]
        made = [AddedToken(token, special=special, normalized=False) for token in new]
        tokenizer.add_tokens(made, special_tokens=special)


def _set_special(tokenizer: PreTrainedTokenizerBase, name: str, token: str) -> None:
    """Make a token of the vocabulary the tokenizer's bos, eos or unk, also where its rules put the former one before
    or behind a text. UsageError: the vocabulary does not have it."""
    if token not in tokenizer.get_vocab():
        raise UsageError(
            f"model.special_tokens.{name} = {token!r}, which the tokenizer does not have",
            expected="a token of the vocabulary, or one that model.add_tokens adds",
            fix=f"add {token!r} to model.add_tokens",
        )
    former = getattr(tokenizer, f"{name}_token")
    setattr(tokenizer, f"{name}_token", token)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if former is None or former == token or backend is None:
        return
    whole = json.loads(backend.to_str())
    numbers = {former: token, tokenizer.get_vocab()[former]: tokenizer.get_vocab()[token]}
    whole["post_processor"] = _replaced(whole["post_processor"], numbers)
    if whole["post_processor"] is not None:
        backend.post_processor = Tokenizer.from_str(json.dumps(whole)).post_processor


def _replaced(node: Any, values: dict[Any, Any]) -> Any:
    """A JSON value in which strings, keys and whole numbers of `values` are replaced."""
    if isinstance(node, dict):
        return {values.get(key, key): _replaced(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, values) for value in node]
    return values.get(node, node) if type(node) in (str, int) else node


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens (id = byte value) and 8 special tokens; decode(encode(text)) == text for every text."""
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
    """Choose a pad token where there is none: unk, else eos. Padding is recognised by the attention mask and labels of
    -100 (the label mask), never by its id, so with eos as padding the real eos is still a target."""
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
    """Raise UsageError for token ids of `embedding_rows` or above: the model has no embedding for these."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= embedding_rows:
        raise UsageError(
            f"the tokenizer's largest token id is {largest}, but the model embeds only {embedding_rows} tokens",
            expected=f"ids below {embedding_rows}",
            fix="remove model.tokenizer to use the model's own, or choose a model made for this tokenizer",
        )


def _pretrained(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    where = str(find_run_weights(source)) if source.startswith(RUN_PREFIX) else source
    folder = path_of(where)
    if folder.is_dir():
        where = str(folder)
    require_reachable(where, "tokenizer", revision)
    opener = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = opener.from_pretrained(
            where, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the library of tokenizers raises plain ones for a damaged tokenizer.json
        raise loading_error(error, where, "tokenizer") from error
    require_bounded_expressions(tokenizer, where)
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer_config.json names a generic class and must be loaded as PreTrainedTokenizerFast: AutoTokenizer
    would choose by the model type in config.json."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{config} is not a JSON object: {error}", fix="restore the file") from error


def _template_text(template: str) -> str:
    """The content of a .jinja file, else `template` itself."""
    if not template.endswith(".jinja"):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the chat template {template}: {error}", fix="correct model.chat_template"
        ) from error


def _letter_of_each_byte() -> list[str]:
    """The character of each byte in ByteLevel (GPT-2's byte-to-unicode table): printable Latin-1 represents itself,
    other bytes are characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (chr(code) for code in range(0x100, 0x200))
    return [chr(value) if value in printable else next(moved) for value in range(256)]
