"""Images as a model sees them: opened, resized, turned into pixels and image tokens; and as characters on a
terminal."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config.schema.data import Source
from engine.data.bounds import IMAGE_BYTES, IMAGE_PIXELS, read_regular
from engine.data.chat import TokenRow
from engine.data.chat_template import Span
from engine.data.formats import Format
from engine.data.image_formats import Box, DetectionRecord
from engine.data.preferences import JudgedRecord, LabelledRecord, PreferenceRecord
from engine.data.records import ChatRecord, Dropped, ImageReference, Record, SourceRows
from engine.errors import DataError

MOST_COLUMNS, MOST_ROWS = 48, 48
"""Pixels of the largest picture: 48 characters wide and 24 lines high."""

BOX_COLOUR = (255, 0, 60)


def small_picture(image: Any, boxes: Sequence[Box] = ()) -> NDArray[np.uint8]:
    """At most MOST_COLUMNS × MOST_ROWS pixels with outlines of `boxes`: uint8[rows, columns, 3], rows even."""
    scale = min(MOST_COLUMNS / image.width, MOST_ROWS / image.height)
    columns = max(1, round(image.width * scale))
    rows = max(2, 2 * round(image.height * scale / 2))
    pixels = np.array(image.convert("RGB").resize((columns, rows)))
    for left, top, right, bottom in boxes:
        first, last = int(left * columns), min(columns - 1, int(right * columns))
        upper, lower = int(top * rows), min(rows - 1, int(bottom * rows))
        pixels[[upper, lower], first : last + 1] = BOX_COLOUR
        pixels[upper : lower + 1, [first, last]] = BOX_COLOUR
    return pixels


UNREADABLE = "image cannot be read"
"""First words of the reason for which a row with a broken or missing image is dropped."""

TOO_MANY_PIXELS = f"an image of more than {IMAGE_PIXELS:,} pixels"
"""Reason for which a row with a larger image is dropped."""

UNREADABLE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, OverflowError, RuntimeError, struct.error, zlib.error)
"""What opening a path and Pillow raise for files that are missing or broken; RuntimeError: a home folder of nobody."""


class TooManyPixels(Exception):
    """An image has more than IMAGE_PIXELS."""


DECODING_THREADS = 4
"""Images decoded at once if data.workers is 0. Pillow lets other threads run while it decodes."""


class ImageFacts(NamedTuple):
    """What is known of an image without its pixels."""

    height: int
    """Patches from top to bottom, once the image is resized for the model."""
    width: int
    """Patches from left to right, once the image is resized for the model."""
    digest: int
    """The first 8 bytes of the BLAKE2b hash of its file."""


@dataclass(frozen=True)
class ImageProcessor:
    """transformers' processor on Pillow, and the tokens that stand for an image in a text."""

    processor: Any
    """A transformers image processor of the PIL backend."""
    takes: Literal["patches", "squares", "whole"]
    """patches: any size, with a grid for each (Qwen2-VL, Qwen2.5-VL); squares: all resized to one size (Gemma 3);
    whole: what the model's own processor makes of them (`engine.data.own_processor`)."""
    token_id: int
    """Stands for a part of an image. The model replaces its embeddings, so it is never learned."""
    merge: int
    """`merge` × `merge` patches become one token."""
    patch_side: int
    """Pixels along a side of a patch."""
    tokens_per_image: int | None = None
    """Tokens of each image where all images have one size."""
    written: tuple[str, str] | None = None
    """(the text that the chat template writes for an image, the text that replaces it), if it is replaced."""

    def patches_of(self, height: int, width: int) -> tuple[int, int]:
        """Patches from top to bottom and from left to right of `height` × `width` pixels. Raises ValueError for an
        image that the processor does not take."""
        if self.tokens_per_image is not None:
            side = int(self.processor.size["height"]) // self.patch_side
            return side, side
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self.processor.size
        high, wide = smart_resize(
            height, width, self.patch_side * self.merge, size["shortest_edge"], size["longest_edge"]
        )
        return high // self.patch_side, wide // self.patch_side

    def fingerprint_parts(self) -> list[str]:
        """Everything that determines the tokens and pixels of an image."""
        return [self.processor.to_json_string(), repr((self.takes, self.token_id, self.merge, self.tokens_per_image))]

    def expansion(self, image: ImageFacts) -> list[int]:
        """The tokens that replace `token_id` in the text, one for each part of the image."""
        return [self.token_id] * (self.tokens_per_image or image.height * image.width // self.merge**2)

    def pixels(self, image: Any) -> dict[str, NDArray[Any]]:
        """`pixel_values`, and for patches `image_grid_thw`."""
        made = self.processor(images=[image], return_tensors="np")
        return {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw") if name in made}

    def inputs(self, images: Sequence[Mapping[str, NDArray[Any]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """The model's inputs by name: the arrays of all `images`, in the order of the rows `ids_BS`, concatenated, and
        the type (1: image) of each token."""
        if not images:
            return {}
        joined = {name: np.concatenate([image[name] for image in images]) for name in images[0]}
        types_BS = (ids_BS == self.token_id).to(torch.int64)
        kind = "mm_token_type_ids" if self.takes == "patches" else "token_type_ids"
        return {**{name: torch.from_numpy(values) for name, values in joined.items()}, kind: types_BS}

    def save(self, folder: Path) -> None:
        """Write the processor's files beside a result."""
        self.processor.save_pretrained(folder)


def read_bytes(reference: ImageReference, root: str | None) -> bytes:
    """Relative paths are relative to `root`. Raises OSError if the file cannot be read."""
    if reference.data is not None:
        return reference.data
    return read_regular((Path(root or ".") / (reference.path or "")).expanduser(), IMAGE_BYTES)


def decoded(data: bytes) -> Any:
    """A Pillow image, upright by its EXIF data. Raises an UNREADABLE_ERRORS for broken bytes, and for more than
    IMAGE_PIXELS pixels, which are not decoded."""
    from PIL import Image, ImageOps

    try:
        opened = Image.open(BytesIO(data))
    except Image.DecompressionBombError as error:
        raise TooManyPixels(str(error)) from error
    with opened as image:
        if image.width * image.height > IMAGE_PIXELS:
            raise TooManyPixels(f"{image.width:,} x {image.height:,} pixels")
        image.load()
        upright = ImageOps.exif_transpose(image)
        return upright.convert("RGB")


def references_of(record: Record | DetectionRecord | JudgedRecord | Dropped) -> tuple[ImageReference, ...]:
    """The images of a record, in order; empty for a record without images or a dropped row."""
    if isinstance(record, DetectionRecord):
        return (record.image,)
    if isinstance(record, PreferenceRecord):
        return references_of(record.chosen)  # both sides have the row's
    if isinstance(record, LabelledRecord):
        return references_of(record.record)
    return record.images if isinstance(record, ChatRecord) else ()


def facts_of(
    references: Sequence[ImageReference], root: str | None, processor: ImageProcessor
) -> tuple[list[ImageFacts], list[tuple[int, int]]] | Dropped:
    """(facts, (height, width) in pixels) of the images, or the reason for dropping the row. Decoding while tokens are
    made finds unreadable images before training starts; an image's size determines its number of tokens. Pixels are not
    kept."""
    facts, sizes = [], []
    for reference in references:
        try:
            data = read_bytes(reference, root)
            width, height = decoded(data).size
            facts.append(ImageFacts(*processor.patches_of(height, width), digest_of(data)))
        except UNREADABLE_ERRORS as error:
            return Dropped(f"{UNREADABLE} ({type(error).__name__})")
        except TooManyPixels:
            return Dropped(TOO_MANY_PIXELS)
        sizes.append((height, width))
    return facts, sizes


def stamps_of_images(rows: SourceRows, format_: Format) -> str:
    """A hash of path, size and time of change of every image file that the rows name, which tells the token cache that
    images were replaced. Images inside the rows are covered by the hash of the rows."""
    stamps = hashlib.blake2b(digest_size=16)
    for batch in rows.batches():
        for row in batch:
            for reference in references_of(format_.record(row)):
                if reference.path is not None:
                    stamps.update(repr((reference.path, _stamp(reference.path, format_.image_root))).encode())
    return stamps.hexdigest()


def _stamp(path: str, root: str | None) -> tuple[int, int] | None:
    try:
        found = (Path(root or ".") / path).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return None  # a missing image, or a path that no file can have: its row is dropped
    return found.st_size, found.st_mtime_ns


def digest_of(data: bytes) -> int:
    """The first 8 bytes of the BLAKE2b hash, as a number."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class ImageSource:
    rows: SourceRows
    format: Format


class ImageReader:
    """Reads the pixels of samples when a micro-batch is made."""

    def __init__(self, processor: ImageProcessor, sources: Sequence[ImageSource], workers: int = 0) -> None:
        """`workers`: images decoded at once; 0: DECODING_THREADS."""
        self.processor, self.sources = processor, list(sources)
        self.part_id = processor.token_id if processor.takes == "whole" else None
        self._threads = ThreadPoolExecutor(workers or DECODING_THREADS, "images")

    def inputs(self, wanted: Sequence[tuple[int, int, Sequence[int]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """See PixelReader. Raises DataError for an image that has changed, or is gone, since its tokens were made."""
        waiting = []
        for source, origin, digests in wanted:
            given = self.sources[source]
            references = references_of(given.format.record(given.rows.row(origin))) if digests else ()
            for reference, digest in zip(references, digests, strict=False):  # a row may end before the last image
                waiting.append(self._threads.submit(self._one, given, origin, reference, digest))
        return self.processor.inputs([future.result() for future in waiting], ids_BS)

    def pictures(self, source: int, origin: int) -> list[NDArray[np.uint8]]:
        """See PixelReader; with the reference boxes of a detection sample. Raises DataError for an unreadable image."""
        given = self.sources[source]
        record = given.format.record(given.rows.row(origin))
        found = []
        for reference in references_of(record):
            try:
                image = decoded(read_bytes(reference, given.format.image_root))
            except (*UNREADABLE_ERRORS, TooManyPixels) as error:
                raise self._unreadable(given, origin, reference, f"it cannot be read: {error}") from error
            boxes = record.shares(image.height, image.width) if isinstance(record, DetectionRecord) else []
            found.append(small_picture(image, boxes))
        return found

    def _one(self, given: ImageSource, origin: int, reference: ImageReference, digest: int) -> dict[str, NDArray[Any]]:
        problem = "its bytes have changed"
        try:
            data = read_bytes(reference, given.format.image_root)
            if digest_of(data) == digest:
                return self.processor.pixels(decoded(data))
        except (*UNREADABLE_ERRORS, TooManyPixels) as error:
            problem = f"it cannot be read: {error}"
        raise self._unreadable(given, origin, reference, problem)

    def _unreadable(self, given: ImageSource, origin: int, reference: ImageReference, problem: str) -> DataError:
        (place,) = given.rows.places([origin])
        return DataError(
            f"source {given.format.source}, {place}: image {reference.path or '(in the row)'}: {problem}",
            expected="the images the run was prepared with",
            fix="restore the image; or start a new run, which prepares the data again",
        )


@dataclass(frozen=True)
class PlacedImages:
    """A row in which each image token is repeated for every part of its image."""

    row: TokenRow
    count: int
    end: int
    """Index in `row` of the token after the last image token; 0 without images."""
    added: list[tuple[int, int]]
    """For each image: the position of its token in the original row, and the number of tokens added there."""

    def moved(self, span: Span | None) -> Span | None:
        """Convert a range (start, end) of tokens in the original row to that of the same tokens in `row`."""
        if span is None:
            return None
        start, end = (place + sum(extra for at, extra in self.added if at < place) for place in span)
        return start, end


def place_images(
    row: TokenRow, images: Sequence[ImageFacts], processor: ImageProcessor | None
) -> PlacedImages | Dropped:
    """Replace each image token of `row` by the tokens of its image, in order; unchanged without a processor.

    A row may have fewer image tokens than images, because the row of one turn may end before the last image. With more
    it is dropped: its text contains that token.
    """
    if processor is None:
        return PlacedImages(row, 0, 0, [])
    ids: list[int] = []
    flags: list[bool] = []
    added: list[tuple[int, int]] = []
    end = 0
    for place, (token, flag) in enumerate(zip(*row, strict=True)):
        if token != processor.token_id:
            ids.append(token)
            flags.append(flag)
            continue
        if len(added) == len(images):
            return Dropped("its text contains the image token")
        parts = processor.expansion(images[len(added)])
        added.append((place, len(parts) - 1))
        ids += parts
        flags += [False] * len(parts)
        end = len(ids)
    return PlacedImages((ids, flags), len(added), end, added)


def image_notice(rows: SourceRows, source: Source, reads_images: bool) -> str | None:
    """What is said of a source whose rows hold images that its format leaves out; None if there are none."""
    found = sorted({"image", "images", "file_name", *rows.image_columns}.intersection(rows.columns))
    if reads_images or not found or source.columns:
        return None
    return (
        f"source {source.name}: {', '.join(found)} {'is' if len(found) == 1 else 'are'} not read: images need "
        'format = "image-chat" or "detection", or for preferences "image-preference" or '
        '"image-unpaired-preference"'
    )
