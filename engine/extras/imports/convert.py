"""Imports another tool's configuration: its YAML file, read as plain data (no tags, no aliases, no code, and within
bounds), becomes a recipe that passes the check, with an account of every key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.check.aliases import FACTORY
from engine.config.check.check import check_table
from engine.config.files.document import Place, Problem, decode_utf8, key_text, read_bytes
from engine.config.files.find import KIND_FOLDERS, reach, unshareable_paths, user_folder
from engine.config.files.machine import working_directory
from engine.config.files.text import quoted, visible
from engine.config.files.write import require_name, write_new_file
from engine.config.name_patterns import PARTS
from engine.config.schema.recipe import Recipe
from engine.errors import SpecError, UsageError
from engine.extras.imports.command_lines import read_command_line
from engine.extras.imports.draft import Draft
from engine.extras.imports.llama_factory import find_beside, read_dataset_info
from engine.extras.imports.tools import DEFAULTS, READERS, ROWS, refuse_rewards, require_shapes, tool_of

MAX_DEPTH = 20
MAX_EVENTS = 20_000
"""Values, keys, starts and ends of lists and mappings; the longest example of the tools we read has 600."""

MAX_ENTRIES = 2_000
"""Of one list or mapping."""

MAX_BYTES = 256 << 10
"""Of a file; the longest example has 10 KB."""

LONGEST_NUMBER = 100
"""Characters. Python's time for reading a longer one, and YAML's for numbers in base 60, grows with their square."""

NUMERIC = re.compile(r"[-+.0-9][-+._:0-9a-fA-FxX]*")
"""What YAML may read as a number, whatever its base."""

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d+")
REFERENCE = re.compile(r"\$\{(\w+)\}")


def read_yaml(path: Path) -> tuple[dict[str, Any], str]:
    """The mapping that a YAML file holds, and its text. Raises SpecError with file and line."""
    label = visible(str(path))
    raw = read_bytes(path, label)
    if len(raw) > MAX_BYTES:
        raise SpecError([f"{label}: larger than {MAX_BYTES >> 10} KiB, the limit for training configurations"])
    text = decode_utf8(raw, label)
    return parse_yaml(text, label), text


def parse_yaml(text: str, label: str) -> dict[str, Any]:
    """Numbers such as 2e-5, which YAML 1.1 reads as text, are numbers, and `${key}` is the value of that key."""
    import yaml  # only for files of other tools

    try:
        _require_plain(yaml.parse(text, yaml.SafeLoader), label)
        node = yaml.compose(text, yaml.SafeLoader)
        _require_unique(node, label)
        data = _construct(node, label)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "unreadable"
        raise SpecError([f"{label}{line}: not YAML: {visible(str(reason))}"]) from None
    if not isinstance(data, dict):
        raise SpecError([f"{label}: no keys with values; expected a configuration of another tool"])
    top = {str(key): value for key, value in data.items()}
    return {key: _plain(value, top) for key, value in top.items()}


def _construct(node: Any, label: str) -> Any:
    """The data of a document; `node`: PyYAML's node of it, or None."""
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return None if node is None else loader.construct_document(node)
    except ValueError as error:  # dates and numbers that no calendar and no computer has
        line = next((scalar.start_mark.line + 1 for scalar in _scalars(node) if not _can_be_read(scalar)), 1)
        raise SpecError([f"{label}:{line}: not YAML: {visible(str(error))[:100]}"]) from None


def _scalars(node: Any) -> Iterator[Any]:
    if isinstance(node, tuple):
        for inner in node:
            yield from _scalars(inner)
    elif isinstance(node.value, list):
        for inner in node.value:
            yield from _scalars(inner)
    else:
        yield node


def _can_be_read(scalar: Any) -> bool:
    import yaml

    try:
        yaml.SafeLoader("").construct_document(scalar)
    except ValueError:
        return False
    return True


def _require_plain(events: Any, label: str) -> None:
    depth, count, line = 0, 0, 1
    while True:
        try:
            event = next(events, None)
        except ValueError as error:  # numbers in escapes and directives
            raise SpecError([f"{label}:{line}: not YAML: {visible(str(error))[:100]}"]) from None
        if event is None:
            return
        count += 1
        kind = type(event).__name__
        line = event.start_mark.line + 1
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > MAX_DEPTH or count > MAX_EVENTS:
            raise SpecError([f"{label}:{line}: nested too deeply or too long for a training configuration"])
        if kind == "ScalarEvent" and event.implicit[0] and _is_long_number(event.value):
            raise SpecError([f"{label}:{line}: a number of {len(event.value):,} characters"], fix="shorten it")
        if kind == "AliasEvent":
            raise SpecError([f"{label}:{line}: an alias (*{visible(event.anchor)})"], fix="write out the value")
        if getattr(event, "tag", None):
            raise SpecError(
                [f"{label}:{line}: a tag ({visible(event.tag)[:60]}), which can name code"], fix="remove the tag"
            )


def _is_long_number(text: str) -> bool:
    return len(text) > LONGEST_NUMBER and NUMERIC.fullmatch(text) is not None


def _require_unique(node: Any, label: str) -> None:
    """`node`: a node of PyYAML. Of a key that is given twice YAML readers keep the last one without a word."""
    pairs = node.value if node is not None and isinstance(node.value, list) else []
    if len(pairs) > MAX_ENTRIES:
        line = node.start_mark.line + 1
        raise SpecError([f"{label}:{line}: {len(pairs):,} entries, too many for a training configuration"])
    seen: set[str] = set()
    for pair in pairs:
        key, value = pair if isinstance(pair, tuple) else (None, pair)
        if key is not None:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise SpecError([f"{label}:{line}: {visible(name)[:60]} occurs twice"], fix="remove one of them")
            seen.add(name)
        _require_unique(value, label)


def _plain(node: Any, top: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {str(key): _plain(value, top) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, top) for value in node]
    if isinstance(node, str):
        whole = REFERENCE.fullmatch(node)
        known = top.get(whole[1]) if whole else None
        if isinstance(known, (int, float)):
            return known
        text = REFERENCE.sub(lambda hit: top[hit[1]] if _is_word(top.get(hit[1])) else hit[0], node)
        return float(text) if len(text) <= LONGEST_NUMBER and NUMBER.fullmatch(text) else text
    return node if node is None or isinstance(node, (bool, int, float)) else str(node)


def _is_word(value: Any) -> bool:
    """Short enough that many references to it stay small."""
    return isinstance(value, str) and len(value) <= 200


ENDINGS = (".yml", ".yaml")
SCRIPTS = (".sh", ".bash", ".txt")
ORDER = ("model", "method", "preference", "data", "train", "checkpoint", "eval", "moe", "parallel", "trackers")


def write_recipe(
    draft: Draft, source: Path, *, name: str | None = None, to: Path | None = None, force: bool = False
) -> Path:
    """Write the recipe to `to`, or into the user's folder as `name` or after its source; return the path.

    Raises UsageError for a name that is not valid and, without `force`, for a file that exists.
    """
    if name is not None:
        require_name(name)
    target = to or user_folder() / KIND_FOLDERS["recipe"] / f"{name or name_for(source)}.toml"
    return write_new_file(target, recipe_text(draft, source.name).encode(), force=force)


def name_for(source: Path) -> str:
    return re.sub("[^a-z0-9._-]+", "-", source.stem.lower()).strip("-._")[:80] or "imported"


def draft_of(source: Path, *, devices: int = 1) -> Draft:
    """Read a file of another tool, or a script with its command line, into a draft of a recipe.

    Raises SpecError for a file that is not such a configuration or trains in a way that is not supported, UsageError
    for a symbolic link.
    """
    if source.is_symlink():
        raise UsageError(f"{visible(str(source))} is a symbolic link", expected="the file itself")
    label = visible(str(source))
    folders = (working_directory(), source.absolute().parent)
    if source.suffix.lower() in SCRIPTS:
        text = decode_utf8(read_bytes(source, label), label)
        tool, trainer, data = read_command_line(text, label)
        draft = Draft(tool, dict(data), devices, text=text, folders=folders, trainer=trainer)
    else:
        data, text = read_yaml(source)
        tool = tool_of(data, label)
        draft = Draft(tool, dict(data), devices, text=text, folders=folders)
    draft.dataset_info = read_dataset_info(source, str(data.get("dataset_dir") or "data"), working_directory())
    if tool == FACTORY and isinstance(named := data.get("train_dataset"), str) and named.endswith(ENDINGS):
        beside = find_beside(source, named, working_directory())
        draft.dataset_info = read_yaml(beside)[0] if beside else {}
    try:
        require_shapes(draft)
        refuse_rewards(draft)
        READERS[tool](draft)
        draft.take_batch(ROWS[tool])
        _take_rates(draft)
        draft.take_rest()
    except SpecError as error:
        problems = [problem if problem.startswith(label) else f"{label}: {problem}" for problem in error.problems]
        raise SpecError(problems, fix=error.fix) from None
    for ours, value in DEFAULTS[tool].items():
        if ours == "train.epochs" and draft.get("train.max_steps") is not None:
            continue
        if not (ours.startswith("method.") and draft.get("method.kind") == "full"):
            draft.default(ours, value)
    _settle(draft)
    _drop_refused(draft, label)
    draft.settle_account(data)
    return draft


def _take_rates(draft: Draft) -> None:
    """Set groups with their own learning rates: lora_B by LoRA+, and embeddings."""
    rate = next(
        (draft.theirs[key] for key in ("learning_rate", "lr") if isinstance(draft.theirs.get(key), float)), None
    )
    groups: list[dict[str, Any]] = []
    for key in ("loraplus_lr_ratio", "lorap_lr_ratio", "peft_config.loraplus_lr_ratio"):
        ratio = draft.theirs.get(key)
        if isinstance(ratio, (int, float)) and rate is not None and draft.get("method.kind") != "full":
            groups.append({"match": "**lora_B**", "learning_rate": rate * draft.take(key)})
            draft.origin["train.groups"] = key
    if groups:
        draft.set("train.groups", groups, draft.origin["train.groups"])


def _settle(draft: Draft) -> None:
    """Decide what follows from several keys at once."""
    model = draft.get("model.id")
    if isinstance(model, str) and (reason := reach(model.removeprefix("./"))):
        draft.blanks["model.id"] = f"{quoted(model)} {reason}: set the model's hub id or local folder"
        draft.set("model.id", Path(model).name or "model", draft.origin["model.id"])
    if not draft.get("data.sources"):
        draft.blanks["data.sources"] = "the file does not set a data set: set the path of yours"
        draft.set("data.sources", [{"name": "main", "path": "data/train.jsonl"}], "a placeholder")
    by_steps = "max_steps_per_epoch" not in draft.origin.get("train.max_steps", "max_steps_per_epoch")
    if by_steps and draft.get("train.epochs") is not None:
        draft.leave(draft.origin.pop("train.epochs"), "that file sets a number of steps, which takes precedence")
        del draft.recipe["train"]["epochs"]
    _settle_method(draft)
    if draft.unbounded_length:
        draft.notes.append("that file does not truncate; here data.max_length is 2048 tokens, and longer text is split")
    _settle_schedule(draft)
    _settle_preferences(draft)
    has_validation = bool(draft.get("data.valid_fraction") or draft.get("data.validation"))
    if not has_validation:
        for ours in ("eval.every_steps", "eval.per_epoch", "eval.early_stopping_patience", "checkpoint.result"):
            if draft.get(ours) not in (None, "last"):
                table, key = ours.split(".")
                del draft.recipe[table][key]
                draft.leave(draft.origin.pop(ours), "there is no held-out data to evaluate on")
    if draft.get("data.loss_on") == "completion" and "default" in draft.origin.get("data.loss_on", ""):
        draft.recipe["data"].pop("loss_on")


def _settle_parts(draft: Draft) -> None:
    """Keep the names of parts in method.freeze, except where they name nothing that is trained: adapters chosen by
    all-linear and attention are in the language model alone."""
    parts = [name for name in draft.get("method.freeze") or [] if name in PARTS]
    if not parts or draft.get("method.kind") == "full" or isinstance(draft.get("method.targets"), list):
        return
    theirs, rest = draft.origin["method.freeze"], [name for name in draft.get("method.freeze") if name not in parts]
    if "language" in parts:
        draft.blanks[theirs] = "language: list the modules that get adapters in method.targets"
    else:
        draft.leave(theirs, "the base is frozen; all-linear and attention put adapters only into the language model")
    draft.recipe["method"]["freeze"] = rest
    if not rest:
        del draft.recipe["method"]["freeze"], draft.origin["method.freeze"]


def _settle_method(draft: Draft) -> None:
    _settle_parts(draft)
    if draft.get("method.kind") != "full":
        return
    for key in ("rank", "alpha", "dropout", "targets", "exclude", "also_train", "rslora", "dora", "adapter_dtype"):
        if draft.recipe["method"].pop(key, None) is not None:
            draft.leave(draft.origin.pop(f"method.{key}"), "no adapter is trained")
    if draft.recipe.get("model", {}).get("quantize") == "nf4":
        draft.refuse(draft.origin["model.quantize"], True, "weights in 4 bits cannot be trained in full")
    if draft.rounds_weights and draft.get("model.dtype") in (None, "auto", "bfloat16"):
        draft.set("train.rounding", "nearest", f"{draft.tool} trains the bfloat16 weights themselves")
        if draft.get("train.optimizer") in (None, "adamw", "sgd"):
            draft.set("train.state_dtype", "bfloat16", f"{draft.tool} trains the bfloat16 weights themselves")
        draft.notes.append(
            "weights in bfloat16 lose most small updates; remove train.rounding and train.state_dtype to keep them"
        )


def _settle_schedule(draft: Draft) -> None:
    if draft.origin.get("train.scheduler") != "lr_scheduler_type" or draft.said.get("lr_scheduler_type") != "constant":
        return
    for ours in ("train.warmup_ratio", "train.warmup_steps"):
        if draft.get(ours) is not None:
            del draft.recipe["train"][ours.partition(".")[2]]
            draft.leave(draft.origin.pop(ours), 'its schedule "constant" has no warm-up')


def _settle_preferences(draft: Draft) -> None:
    if draft.get("method.objective") != "dpo":
        return
    if draft.get("method.dropout"):
        del draft.recipe["method"]["dropout"]
        draft.leave(draft.origin.pop("method.dropout"), "dropout is disabled for preference training, as in that tool")
    for source in [*draft.get("data.sources"), *(draft.get("data.validation") or [])]:
        with_images = source.get("format") in ("image-chat", "image-preference") or draft.has_images
        if draft.get("preference.loss") != "kto":
            source["format"] = "image-preference" if with_images else "preference"
        elif source.get("format") != "image-preference":
            # Without images, rows with labels and pairs are both recognised by their columns.
            source["format"] = "image-unpaired-preference" if with_images else "auto"
        source.pop("template", None)


def _drop_refused(draft: Draft, label: str) -> None:
    """Make each value that the check does not accept a blank, with its reason; raise where that is model or data."""
    draft.recipe = {key: draft.recipe[key] for key in ORDER if draft.recipe.get(key)}
    for _ in range(20):
        _, problems = check_table(Recipe, {"schema": 1, "kind": "recipe", "name": "imported", **draft.recipe})
        problems += unshareable_paths(draft.recipe)
        if not problems:
            return
        for problem in problems:
            _drop(draft, problem, label)
    raise SpecError([f"{label}: its values contradict each other"], fix="nothing was imported")


def _drop(draft: Draft, problem: Problem, label: str) -> None:
    place = next((one for one in (problem.place, *problem.beside) if one[:2] in _droppable(draft)), None)
    words = f"{key_text(problem.place, draft.recipe)}: {problem.found}; {problem.allowed}"
    if place is None:
        raise SpecError([f"{label}: {words}"], fix="nothing was imported")
    table, key = str(place[0]), str(place[1])
    value = draft.recipe[table].pop(key)
    theirs = draft.origin.pop(f"{table}.{key}", f"{table}.{key}")
    draft.ask(theirs, f"{table}.{key}", f"{quoted(value)}: {problem.found}; {problem.allowed}")


def _droppable(draft: Draft) -> set[Place]:
    fixed: set[Place] = {
        ("model", "id"),
        ("data", "sources"),
        ("data", "validation"),
        ("method", "kind"),
        ("method", "objective"),
    }
    there: set[Place] = {(table, key) for table, keys in draft.recipe.items() for key in keys}
    return there - fixed


def recipe_text(draft: Draft, file: str) -> str:
    """The recipe as TOML, headed by what was left out and what is to be filled in."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(visible(f"Imported from {draft.tool}'s {file}.")))
    for title, rows in (("To fill in", draft.blanks), ("Left out", draft.left_out)):
        for key, reason in rows.items():
            document.add(tomlkit.comment(visible(f"{title}: {key}: {reason}")[:300]))
    document["schema"] = 1
    document["kind"] = "recipe"
    document["title"] = visible(f"From {draft.tool}'s {file}")[:100]
    for table, keys in draft.recipe.items():
        document[table] = _toml_table(tomlkit, keys)
    return tomlkit.dumps(document)


def _toml_table(tomlkit: Any, keys: dict[str, Any]) -> Any:
    made = tomlkit.table()
    nested = {
        key: value for key, value in keys.items() if value and isinstance(value, list) and isinstance(value[0], dict)
    }
    for key, value in keys.items():
        if key not in nested:
            made[key] = value
    for key, entries in nested.items():
        array = tomlkit.aot()
        for entry in entries:
            array.append(_toml_table(tomlkit, entry))
        made[key] = array
    return made
