"""Reads images, and makes the inputs of a vision-language model of them.

Every image is decoded once when tokens are made: an unreadable image is found before training starts, and the size of
an image determines its number of tokens. Pixels are not kept. Threads read them again when a micro-batch is made; an
image whose bytes have changed by then ends the run.

`engine.model.image_processor` loads a model's ImageProcessor. Try: `python -m pytest tests/data/test_images.py`
"""

from __future__ import annotations

import hashlib
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

from engine.data.formats import Format
from engine.data.image_formats import DetectionRecord
from engine.data.picture import small_picture
from engine.data.records import ChatRecord, Dropped, ImageReference, Record
from engine.data.source_rows import SourceRows
from engine.errors import DataError

UNREADABLE = "image cannot be read"
"""First words of the reason for which a row with a broken or missing image is dropped."""

DECODING_THREADS = 4
"""Images decoded at once if data.workers is 0. Pillow lets other threads run while it decodes."""


class ImageFacts(NamedTuple):
    """What is known of an image without its pixels."""

    height: int
    """Number of patches from top to bottom, once the image is resized for the model."""
    width: int
    """Number of patches from left to right, once the image is resized for the model."""
    digest: int
    """The first 8 bytes of the BLAKE2b hash of its file."""


@dataclass(frozen=True)
class ImageProcessor:
    """How a model takes images: transformers' processor on Pillow, and the tokens that stand for an image in a text."""

    processor: Any
    """A transformers image processor of the PIL backend."""
    takes: Literal["patches", "squares"]
    """patches: images of any size as patches, with a grid for each (Qwen2-VL, Qwen2.5-VL); squares: all images are
    resized to one size (Gemma 3)."""
    token_id: int
    """The token that stands for a part of an image. The model replaces its embeddings."""
    merge: int
    """`merge` × `merge` patches become one token."""
    patch_side: int
    """Pixels along a side of a patch."""
    tokens_per_image: int | None = None
    """Tokens of each image where all have one size."""
    written: tuple[str, str] | None = None
    """(the text that the chat template writes for an image, the text that replaces it); None if nothing is replaced."""

    def patches_of(self, height: int, width: int) -> tuple[int, int]:
        """Patches from top to bottom and from left to right of an image of `height` × `width` pixels.

        Raises ValueError for an image that the processor does not take."""
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
        """Everything that determines the tokens and pixels of an image, as texts for a fingerprint."""
        return [self.processor.to_json_string(), repr((self.takes, self.token_id, self.merge, self.tokens_per_image))]

    def tokens_of(self, image: ImageFacts) -> int:
        """Number of tokens that an image takes in a sequence."""
        return self.tokens_per_image or image.height * image.width // self.merge**2

    def pixels(self, image: Any) -> dict[str, NDArray[Any]]:
        """The processor's arrays of one image: `pixel_values`, and for patches `image_grid_thw`."""
        made = self.processor(images=[image], return_tensors="np")
        return {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw") if name in made}

    def inputs(self, images: Sequence[Mapping[str, NDArray[Any]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """The model's inputs by name: the arrays of all `images`, concatenated, and the type (1: image) of each token
        of the rows `ids_BS`. Images are in the order of the rows; empty without images."""
        if not images:
            return {}
        joined = {name: np.concatenate([image[name] for image in images]) for name in images[0]}
        types_BS = (ids_BS == self.token_id).to(torch.int64)
        kind = "mm_token_type_ids" if self.takes == "patches" else "token_type_ids"
        return {**{name: torch.from_numpy(values) for name, values in joined.items()}, kind: types_BS}


def read_bytes(reference: ImageReference, root: str | None) -> bytes:
    """The bytes of an image's file. Relative paths are relative to `root`. Raises OSError if it cannot be read."""
    if reference.data is not None:
        return reference.data
    return (Path(root or ".") / (reference.path or "")).expanduser().read_bytes()


def decoded(data: bytes) -> Any:
    """The Pillow image of a file's bytes, turned upright as its EXIF data say.

    Raises OSError, SyntaxError or ValueError if the bytes are no image, or a broken one."""
    from PIL import Image, ImageOps

    with Image.open(BytesIO(data)) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return upright.convert("RGB")


def references_of(record: Record | DetectionRecord | Dropped) -> tuple[ImageReference, ...]:
    """The images of a record, in order; empty for a record without images or a dropped row."""
    if isinstance(record, DetectionRecord):
        return (record.image,)
    return record.images if isinstance(record, ChatRecord) else ()


def facts_of(
    references: Sequence[ImageReference], root: str | None, processor: ImageProcessor
) -> tuple[list[ImageFacts], list[tuple[int, int]]] | Dropped:
    """(facts of each image, (height, width) of each image in pixels), or the reason for dropping the row."""
    facts, sizes = [], []
    for reference in references:
        try:
            data = read_bytes(reference, root)
            width, height = decoded(data).size
            facts.append(ImageFacts(*processor.patches_of(height, width), digest_of(data)))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises SyntaxError for broken files
            return Dropped(f"{UNREADABLE} ({type(error).__name__})")
        sizes.append((height, width))
    return facts, sizes


def stamps_of_images(rows: SourceRows, format_: Format) -> str:
    """A hash of path, size and time of change of every image file that the rows name. It tells the token cache that
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
    except OSError:
        return None  # a missing image: its row is dropped
    return found.st_size, found.st_mtime_ns


def digest_of(data: bytes) -> int:
    """The first 8 bytes of the BLAKE2b hash of `data`, as a number."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class ImageSource:
    """The rows and the format of a source, from which an ImageReader reads images again."""

    rows: SourceRows
    format: Format


class ImageReader:
    """Reads the pixels of samples when a micro-batch is made."""

    def __init__(self, processor: ImageProcessor, sources: Sequence[ImageSource], workers: int = 0) -> None:
        """`workers`: images decoded at once; 0: DECODING_THREADS."""
        self.processor, self.sources = processor, list(sources)
        self._threads = ThreadPoolExecutor(workers or DECODING_THREADS, "images")

    def inputs(self, wanted: Sequence[tuple[int, int, Sequence[int]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """The model's inputs, by name, for the images of some samples; `ids_BS` are the samples' tokens. Each sample in
        `wanted` is (number of its source, row in its source, the digests of its images).

        Raises DataError for an image that has changed, or is gone, since its tokens were made.
        """
        waiting = []
        for source, origin, digests in wanted:
            given = self.sources[source]
            references = references_of(given.format.record(given.rows.row(origin))) if digests else ()
            for reference, digest in zip(references, digests, strict=False):  # a row may end before the last image
                waiting.append(self._threads.submit(self._one, given, origin, reference, digest))
        return self.processor.inputs([future.result() for future in waiting], ids_BS)

    def pictures(self, source: int, origin: int) -> list[NDArray[np.uint8]]:
        """Small pictures of the images of a sample, for display: RGB as uint8[rows, columns, 3] each, with the boxes of
        a detection sample's reference drawn into the pixels. The sample is named by the number of its source and its
        row there. Raises DataError for an image that cannot be read."""
        given = self.sources[source]
        record = given.format.record(given.rows.row(origin))
        found = []
        for reference in references_of(record):
            try:
                image = decoded(read_bytes(reference, given.format.image_root))
            except (OSError, SyntaxError, ValueError) as error:
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
        except (OSError, SyntaxError, ValueError) as error:
            problem = f"it cannot be read: {error}"
        raise self._unreadable(given, origin, reference, problem)

    def _unreadable(self, given: ImageSource, origin: int, reference: ImageReference, problem: str) -> DataError:
        (place,) = given.rows.places([origin])
        return DataError(
            f"source {given.format.source}, {place}: image {reference.path or '(in the row)'}: {problem}",
            expected="the images that the run was prepared with",
            fix="put the image back; or start a new run, which prepares the data again",
        )
