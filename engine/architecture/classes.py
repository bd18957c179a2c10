"""Whether the installed transformers has a class for a model that can be trained on text, and a processor for one that
is trained on images, by its config.json. Asked of transformers' own tables and classes, whose files are parsed:
importing them takes seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

from engine.config.check.data_rules import image_key
from engine.config.files.machine import install_packages
from engine.config.schema.recipe import Recipe
from engine.errors import UsageError

MAPPINGS = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
"""In transformers' `models/auto/modeling_auto.py`: names of classes by model type, in the order in which the engine
looks for one (`engine.model.config.auto_class`)."""
NEED_AN_IMAGE, DRAFTS = (
    "cannot be trained on text alone: it needs an image in every sample",
    "cannot be trained on text alone: it drafts tokens from the states of another model",
)
NOT_FROM_TEXT = {
    "idefics": NEED_AN_IMAGE,
    "kosmos-2": NEED_AN_IMAGE,
    "evolla": "cannot be trained on text alone: it needs a protein in every sample",
    "gemma4_assistant": DRAFTS,
    "gemma4_unified_assistant": DRAFTS,
    "blt": "splits each text into patches with a second model",
    "cpmant": "lets tokens attend to later ones",
    "paligemma": "lets the tokens of a prompt attend to later ones",
}
"""Why a model type does not predict text from text alone, which the inputs of its `forward` do not tell. The engine
tries every model on a row of text (`engine.model.verify.verify_logits`, `engine.model.verify.require_causality`); these
are refused earlier than by that."""
NO_TEXT = ("Classification", "Regression", "QuestionAnswering")
"""Ends of the names of transformers' classes that give no text."""


def refuse_class(facts: Mapping[str, Any], model: str) -> None:
    """Raise UsageError if transformers has no class for the config `facts`, or one that does not predict text from text
    alone. Of a model with code of its own, or where transformers is not installed, only the config is asked."""
    model_type = str(facts.get("model_type") or "")
    if facts.get("is_encoder_decoder"):
        raise _not_text_alone(model, model_type, ENCODER_DECODER)
    if facts.get("auto_map") or not _classes():
        return
    _refuse_unknown_type(model_type, model)
    if facts.get("is_encoder_decoder") is None and _is_encoder_decoder(model_type):
        raise _not_text_alone(model, model_type, ENCODER_DECODER)
    names = classes_of(model_type)
    if not names:
        raise no_class(model, model_type)
    stated = [str(name) for name in facts.get("architectures") or ()]
    named = [name for name in names if name in stated]
    reason = NOT_FROM_TEXT.get(model_type) or why_not_text_alone([*named, names[0]][0], model_type)
    if not named and stated and stated[0].endswith(NO_TEXT):
        reason = f"has a {stated[0]}, which does not produce text"
    if reason is not None:
        raise _not_text_alone(model, model_type, reason)
    _refuse_missing_package(facts, model)


def _refuse_missing_package(facts: Mapping[str, Any], model: str) -> None:
    """Raise UsageError if a part of the model is one of the package timm (Gemma 3n's vision encoder), or its class is
    built with scipy (Inkling), and that is not installed."""
    model_type = str(facts.get("model_type") or "")
    with_images = model_type in _table("modeling_auto.py", MAPPINGS[0])
    if with_images and _imports_scipy(model_type) and find_spec("scipy") is None:
        raise UsageError(
            f"{model} needs the package scipy, which is not installed",
            expected="the packages that the model needs",
            fix=install_packages("scipy"),
        )
    parts = [part for part in facts.values() if isinstance(part, Mapping)]
    if any(str(part.get("model_type")) in _types_of_timm() for part in parts) and find_spec("timm") is None:
        raise UsageError(
            f"{model} has a vision encoder from the package timm, which is not installed",
            expected="the packages that the model needs",
            fix=f"{install_packages('timm')}, or choose a model.id without a vision encoder",
        )


@lru_cache(maxsize=64)
def _imports_scipy(model_type: str) -> bool:
    """Whether transformers imports scipy inside a function of the model type, without asking whether it is there."""
    return any(
        re.search(r"^\s+from scipy", text, re.M) and "scipy_avail" not in text
        for text in _texts(model_type, "modeling")
    )


@lru_cache(maxsize=1)
def _types_of_timm() -> set[str]:
    """Model types that transformers opens with a class around one of timm's."""
    models = _models()
    text = (models / "auto" / "modeling_auto.py").read_text("utf-8") if models is not None else ""
    return set(re.findall(r'"([^"]+)",\s*"Timm\w+"', text))


def _not_text_alone(model: str, model_type: str, reason: str) -> UsageError:
    return UsageError(
        f"{model} is a {model_type!r} model, which {reason}",
        expected="a model that predicts each token from the text before it",
        fix="choose another model.id",
    )


def _refuse_unknown_type(model_type: str, model: str) -> None:
    if model_type in _table("configuration_auto.py", "CONFIG_MAPPING_NAMES"):
        return
    raise UsageError(
        f"{model} has the type {model_type!r}, which the installed transformers does not support"
        if model_type
        else f"the config.json of {model} does not set model_type",
        expected="a model that transformers supports",
        fix=f"{install_packages('transformers', upgrade=True)}, or choose another model.id",
    )


def refuse_images(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError if a recipe trains on images and transformers has no processor of images for the config `facts`
    that works without torchvision. Does nothing for a model with code of its own, or without transformers."""
    key, model_type = image_key(recipe), str(facts.get("model_type") or "")
    processors = _table("processing_auto.py", "PROCESSOR_MAPPING_NAMES")
    if key is None or facts.get("auto_map") or not processors:
        return
    backends = _table("image_processing_auto.py", "IMAGE_PROCESSOR_MAPPING_NAMES").get(model_type)
    found = ""
    if not processors.get(model_type):
        found = f"a {model_type!r} model does not support images"
    elif backends is not None and not backends.get("pil"):
        found = f"images of a {model_type!r} model can only be read with torchvision, which is not used here"
    if found:
        raise UsageError(
            f"{key}: {found}",
            expected="a model whose transformers processor reads images with Pillow",
            fix="choose another model, or train on text by removing the sources with images",
        )


@lru_cache(maxsize=8)
def _table(file: str, name: str) -> dict[str, Any]:
    """The table `name` by model type of transformers' `models/auto`, from `file` and the file that transformers makes
    itself: what is stated, and what is added to it. Empty if transformers is not installed."""
    models, found = _models(), dict[str, Any]()
    statement = rf"(?ms)^(?: {{4}})?(?:MISSING_)?{name}(?: = |\.update)\S*\((?:$.*?^(?: {{4}})?|[^\n]*)\)$"
    for path in [models / "auto" / each for each in ("auto_mappings.py", file)] if models else []:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for each in re.findall(statement, text):  # parsing the whole file takes ten times as long
            found |= _pairs(each) or _entries(ast.parse(dedent(each)))
    return found


def _pairs(statement: str) -> dict[str, str]:
    """The entries of a table that has a pair of strings on each line, as most have; else empty. Parsing them took half
    of the time before Launch shows a verdict for the first time."""
    pairs = re.findall(r'(?m)^\s*\(?"([^"]+)"[,:] "([^"]+)"\)?,$', statement)
    return dict(pairs) if len(pairs) == sum('"' in line for line in statement.split("\n")) else {}


def _entries(node: ast.AST) -> dict[str, Any]:
    """The entries of the outermost dicts and lists of pairs within `node`."""
    if isinstance(node, (ast.Dict, ast.List)):
        try:
            return dict(ast.literal_eval(node))
        except ValueError:
            return {}  # an entry that is computed
    found: dict[str, Any] = {}
    for child in ast.iter_child_nodes(node):
        found |= _entries(child)
    return found


def no_class(model: str, model_type: str) -> UsageError:
    """The error for a model type for which transformers has no class that is trained here."""
    return UsageError(
        f"{model} is a {model_type!r} model, which is not a causal language model",
        expected="a model that transformers supports with AutoModelForCausalLM or AutoModelForImageTextToText",
        fix="choose another model.id",
    )


def classes_of(model_type: str) -> list[str]:
    """Names of the classes that open a model type, the one with the most weights first."""
    found = [table[model_type] for table in _classes() if model_type in table]
    return [name if isinstance(name, str) else name[0] for name in found]


def _classes() -> list[dict[str, Any]]:
    """MAPPINGS; empty if transformers is not installed."""
    return [table for name in MAPPINGS if (table := _table("modeling_auto.py", name))]


ENCODER_DECODER = "is an encoder-decoder model"


@lru_cache(maxsize=64)
def _is_encoder_decoder(model_type: str) -> bool:
    """Whether the class of the config says so where a config.json does not."""
    name = _table("configuration_auto.py", "CONFIG_MAPPING_NAMES").get(model_type)
    texts = [text for text in _texts(model_type, "configuration") if "is_encoder_decoder" in text]
    classes = (each for text in texts for each in ast.parse(text).body)
    stated = (line for each in classes if isinstance(each, ast.ClassDef) and each.name == name for line in each.body)
    return any(
        isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and line.target.id == "is_encoder_decoder"
        and isinstance(line.value, ast.Constant)
        and line.value.value is True
        for line in stated
    )


def _texts(model_type: str, kind: str) -> Iterator[str]:
    """The files of a kind ("modeling", "configuration") in transformers' folder of a model type."""
    models, special = _models(), _table("configuration_auto.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    folder = special.get(model_type, model_type.replace("-", "_"))
    for file in sorted((models / folder).glob(f"{kind}_*.py")) if models is not None else []:
        yield file.read_text(encoding="utf-8")


def _models() -> Path | None:
    found = find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).with_name("models")


@lru_cache(maxsize=64)
def why_not_text_alone(name: str, model_type: str) -> str | None:
    """Why the class `name` of transformers does not predict text from text alone, by the source of its `forward`, as
    the end of a sentence. None if it does, or if its source is not in the folder of its model type."""
    forward = _forward(name, model_type)
    if forward is None:
        return None
    given = [argument.arg for argument in forward.args.args[1:]]
    split = len(given) - len(forward.args.defaults)
    needed = [each for each in given[:split] if each != "input_ids"]
    if needed:
        return f"cannot be trained on text alone: it needs {' and '.join(needed)} in every sample"
    return ENCODER_DECODER if "decoder_input_ids" in given[split:] else _why_other_logits(forward)


def _why_other_logits(forward: ast.FunctionDef) -> str | None:
    """Why the logits are not those of one head, as `engine.model.head` finds on the model itself."""
    for line in (each for each in ast.walk(forward) if isinstance(each, ast.Assign)):
        for target in line.targets:
            if _is_named(target, "logits") and _calls_of_self(line.value) > 1:
                return "computes its logits with a second layer before its head"
            if isinstance(target, ast.Subscript) and _is_named(target.value, "logits") and _of_tokens(target.slice):
                return "changes the logits of some tokens after its head"
    return None


def _of_tokens(places: ast.expr) -> bool:
    """Whether the last index chooses some tokens of the vocabulary: `[..., chosen]`, but not `[:, first:last]`."""
    last = places.elts[-1] if isinstance(places, ast.Tuple) else places
    return not isinstance(last, ast.Slice)


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _calls_of_self(node: ast.AST) -> int:
    """How many modules are called, one on the result of the other: `self.decoder(self.lm_head(states))` has two."""
    if not isinstance(node, ast.Call):
        return 0
    own = isinstance(node.func, ast.Attribute) and _is_named(node.func.value, "self")
    return int(own) + max(map(_calls_of_self, node.args), default=0)


def _forward(name: str, model_type: str) -> ast.FunctionDef | None:
    sources = (re.split(rf"^class {name}\b", text, flags=re.MULTILINE) for text in _texts(model_type, "modeling"))
    for source in (re.split(r"^[^\s()]", found[1], flags=re.MULTILINE)[0] for found in sources if len(found) > 1):
        for each in ast.walk(ast.parse(f"class {name}{source}")):
            if isinstance(each, ast.FunctionDef) and each.name == "forward":
                return each
    return None
