"""Rules across the keys of a recipe's data: its sources, validation and images, and whether it trains on images
at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.config.files.data_files import LOADERS, suffix_of
from engine.config.files.document import Place, Problem, Problems
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.files.text import quoted
from engine.config.schema.data import IMAGE_FORMATS, Source
from engine.config.schema.recipe import Recipe


def sources_of(recipe: Recipe) -> Iterator[tuple[Place, Source]]:
    lists = {
        ("data", "sources"): recipe.data.sources,
        ("data", "validation"): recipe.data.validation,
        ("evaluate", "sources"): recipe.evaluate.sources,
    }
    for place, sources in lists.items():
        yield from (((*place, index), source) for index, source in enumerate(sources))


def source_has_one_origin(recipe: Recipe) -> Problems:
    for place, source in sources_of(recipe):
        if source.path is None and source.hub is None:
            yield Problem(place, "neither path nor hub", 'one of them is needed, such as path = "train.jsonl"')
        if source.path is not None and source.hub is not None:
            yield Problem(
                (*place, "hub"),
                f"both path = {quoted(source.path)} and hub = {quoted(source.hub)}",
                "one of them is allowed",
                ((*place, "path"),),
            )
        if source.config is not None and source.hub is None and not _may_be_folder(source.path):
            allowed = "only data sets on the hub, or folders downloaded from it, have configurations"
            yield Problem((*place, "config"), "config without hub", allowed)
        if source.hub is not None and source.hub.startswith((".", "/", "~")):
            yield Problem((*place, "hub"), f"{quoted(source.hub)} is a path", "a file or folder goes in path")
        elif source.hub is not None and os.path.isfile(source.hub):
            allowed = f"path = {quoted(source.hub)} is for files, without hub"
            yield Problem((*place, "hub"), f"{quoted(source.hub)} is a file here", allowed)
        if source.path is not None and not source.path.strip():
            yield Problem((*place, "path"), "an empty path", 'a file, folder or glob is needed, such as "train.jsonl"')


def _may_be_folder(path: str | None) -> bool:
    if path is None or path.startswith(BUILTIN_PREFIX):
        return False
    return os.path.isdir(path) or (suffix_of(Path(path)) not in LOADERS and not os.path.isfile(path))


def detection_is_described(recipe: Recipe) -> Problems:
    """A source of format "detection" has keys that it needs and that no other format has."""
    for place, source in sources_of(recipe):
        values = {key: getattr(source, key) for key in ("prompt", "box_order", "box_scale", "box_text")}
        if source.format != "detection":
            for key in (key for key, value in values.items() if value is not None):
                found = f"{key} with format = {quoted(source.format)}"
                yield Problem((*place, key), found, 'format = "detection" is needed')
            continue
        for key in ("prompt", "box_order", "box_scale"):
            if values[key] is None:
                yield Problem((*place, key), "missing", 'format = "detection" needs it', ((*place, "format"),))


def weights_are_of_training(recipe: Recipe) -> Problems:
    """Reject weights of validation and evaluation, whose samples count once each."""
    for place, source in sources_of(recipe):
        if source.weight != 1.0 and place[:2] != ("data", "sources"):
            found = f"{source.weight:g} in {'.'.join(map(str, place[:2]))}"
            yield Problem((*place, "weight"), found, "only sources of training samples have weights: leave it out")


def mixing_has_sources(recipe: Recipe) -> Problems:
    if recipe.data.mixing == "weights":
        return
    if sum(source.enabled for source in recipe.data.sources) < 2:
        yield Problem(("data", "mixing"), '"probability" with one source', "two or more sources are needed")
    if not recipe.data.shuffle:
        found = '"probability" with shuffle = false'
        yield Problem(("data", "mixing"), found, "shuffle = true is needed", (("data", "shuffle"),))


def something_to_train_on(recipe: Recipe) -> Problems:
    if not any(source.enabled for source in recipe.data.sources):
        places: list[Place] = [("data", "sources", index, "enabled") for index in range(len(recipe.data.sources))]
        yield Problem(
            places[0], "every source is disabled", "at least one source with enabled = true", tuple(places[1:])
        )


def one_kind_of_validation(recipe: Recipe) -> Problems:
    if recipe.data.valid_fraction > 0 and recipe.data.validation:
        yield Problem(
            ("data", "valid_fraction"),
            f"{recipe.data.valid_fraction:g} together with [[data.validation]]",
            "one of them is allowed: a fraction of the training data, or separate data",
            (("data", "validation"),),
        )


def overlap_leaves_room(recipe: Recipe) -> Problems:
    most = recipe.data.max_length // 2
    if recipe.data.overlap > most:
        yield Problem(
            ("data", "overlap"),
            f"{recipe.data.overlap} with max_length = {recipe.data.max_length}",
            f"{most} or less is allowed, half of max_length",
            (("data", "max_length"),),
        )
    if recipe.data.overlap and recipe.data.over_length not in ("auto", "split"):
        found = f"overlap with over_length = {quoted(recipe.data.over_length)}"
        yield Problem(("data", "overlap"), found, 'over_length = "split" is needed')


def image_sizes_in_order(recipe: Recipe) -> Problems:
    low, high = recipe.data.image_min_pixels, recipe.data.image_max_pixels
    if low is not None and high is not None and low > high:
        yield Problem(
            ("data", "image_min_pixels"),
            f"{low} above image_max_pixels = {high}",
            f"{high} or less is allowed",
            (("data", "image_max_pixels"),),
        )


def image_root_has_images(recipe: Recipe) -> Problems:
    for place, source in sources_of(recipe):
        if source.image_root is not None and source.format not in IMAGE_FORMATS:
            found = f'image_root with format = "{source.format}"'
            wanted = " or ".join(map(quoted, IMAGE_FORMATS))
            yield Problem((*place, "image_root"), found, f"format = {wanted} is needed")


def images_are_not_packed(recipe: Recipe) -> Problems:
    if recipe.data.packing and any(source.format in IMAGE_FORMATS for _, source in sources_of(recipe)):
        yield Problem(("data", "packing"), "packing with images", "false is allowed: rows with images are not packed")


def image_key(recipe: Recipe) -> str | None:
    """The first key by which a recipe trains on images, as text for a message; None if it trains on text only."""
    for place, source in sources_of(recipe):
        table = ".".join(str(part) for part in place if isinstance(part, str))
        if source.format in IMAGE_FORMATS:
            return f'{table}.{source.name}.format = "{source.format}"'
    if recipe.data.image_min_pixels is not None or recipe.data.image_max_pixels is not None:
        return "data.image_min_pixels or data.image_max_pixels"
    return None
