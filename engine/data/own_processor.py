"""Images of any model family: the model's own transformers processor is asked which tokens stand for an image, and
which arrays the model is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import ProcessorMixin
from transformers.image_utils import make_nested_list_of_images

from engine.data.images import ImageFacts, ImageProcessor
from engine.errors import EnvironmentProblem, UsageError

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns of the text. All else it returns is of the images."""

MOST_SIZES = 4096
"""Sizes of images whose tokens are kept in memory."""

PROCESSOR_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)
"""What processors raise for an image or a tokenizer that they do not take."""


@dataclass(frozen=True)
class OwnProcessor(ImageProcessor):
    """A model's processor, image and text in one call. `patches_of` gives pixels: only the processor knows patches."""

    files: Mapping[str, Any] = field(default_factory=dict)
    """The parsed JSON files that describe the processor, by name; written beside every result."""
    has_types: bool = False
    """The model is given the kind (1: image) of each token."""
    _expansions: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kind: Any, stated: Mapping[str, Any], images: Any, tokenizer: Any, files: Mapping[str, Any]
    ) -> OwnProcessor:
        """Make a processor of the class `kind` with the settings `stated`. Raises UsageError for one without one token
        that marks the place of an image, and for one whose tokens for an image depend on the images around it."""
        try:
            processor = _without_video(kind, stated, images, tokenizer)
        except ImportError as error:
            raise EnvironmentProblem(
                f"{kind.__name__}: {error}", fix="install the package named in the error"
            ) from error
        except PROCESSOR_ERRORS as error:
            raise UsageError(
                f"{kind.__name__} cannot be created with this tokenizer: {type(error).__name__}: {error}",
                expected="the tokenizer that the model was published with",
                fix="remove model.tokenizer, or train on text: remove the sources with images",
            ) from error
        token = getattr(processor, "image_token", None)
        ids = [] if token is None else processor.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            reason = f"marks images with {token!r}, which is not a single token"
            if token is None:
                raise _refused(processor, reason)
            raise UsageError(
                f"{type(processor).__name__} {reason} of this tokenizer",
                expected="the tokenizer that the model was published with",
                fix="remove model.tokenizer, or train on text: remove the sources with images",
            )
        found = cls(processor, "whole", int(ids[0]), 1, 1, files=files)
        try:
            return found._tried()
        except PROCESSOR_ERRORS as error:
            raise _refused(processor, f"cannot be used with this tokenizer: {type(error).__name__}: {error}") from error

    def _tried(self) -> OwnProcessor:
        """This processor, tried on a text with two images of different sizes."""
        text, sizes = f"a{self.token}b{self.token}c", ((40, 90), (120, 60))
        made = self._made(text, [_blank(*size) for size in sizes])
        plain = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        waiting = iter(sizes)
        ours = [
            part for token in plain for part in (self._expansion(*next(waiting)) if token == self.token_id else [token])
        ]
        if made["input_ids"][0].tolist() != ours:
            raise _refused(self.processor, "writes an image differently if there are other images")
        return OwnProcessor(
            self.processor, "whole", self.token_id, 1, 1, files=self.files, has_types="mm_token_type_ids" in made
        )

    @property
    def token(self) -> str:
        """Marks the place of an image in a text."""
        return str(self.processor.image_token)

    def patches_of(self, height: int, width: int) -> tuple[int, int]:
        """The size itself. Raises ValueError for an image that the processor does not take."""
        try:
            self._expansion(height, width)
        except PROCESSOR_ERRORS as error:
            raise ValueError(f"the processor does not support {width} x {height} pixels: {error}") from error
        return height, width

    def fingerprint_parts(self) -> list[str]:
        return [type(self.processor).__name__, json.dumps(self.files, sort_keys=True), self.token]

    def expansion(self, image: ImageFacts) -> list[int]:
        return self._expansion(image.height, image.width)

    def _expansion(self, height: int, width: int) -> list[int]:
        """The tokens of a blank image: they depend on the size alone, which `_tried` and the model's proof rely on."""
        found = self._expansions.get((height, width))
        if found is None:
            if len(self._expansions) >= MOST_SIZES:
                self._expansions.clear()
            made = self._made(self.token, [_blank(height, width)])
            found = self._expansions[height, width] = made["input_ids"][0].tolist()
        return found

    def _made(self, text: str, images: Sequence[Any]) -> Any:
        return self.processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)

    def pixels(self, image: Any) -> dict[str, NDArray[Any]]:
        """The image as it is, uint8[height, width, 3]: arrays of several images depend on each other (padding)."""
        return {"image": np.asarray(image)}

    def inputs(self, images: Sequence[Mapping[str, NDArray[Any]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """`arrays` of all `images`, in the order of the rows `ids_BS`, and if the model takes it the kind of each
        token."""
        return {**self.arrays(images), **self.token_types(ids_BS)} if images else {}

    def arrays(self, images: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, Tensor]:
        """What the processor makes of all `images` at once."""
        from PIL import Image

        opened = [Image.fromarray(image["image"]) for image in images]
        made = self._made(self.token * len(opened), opened)
        return {name: torch.as_tensor(values) for name, values in made.items() if name not in TEXT_INPUTS}

    def token_types(self, ids_BS: Tensor) -> dict[str, Tensor]:
        """The kind of each token, for models that take it."""
        if not self.has_types:
            return {}
        return {"mm_token_type_ids": torch.tensor(self.processor.create_mm_token_type_ids(ids_BS.tolist()))}

    def save(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _without_video(kind: Any, stated: Mapping[str, Any], images: Any, tokenizer: Any) -> Any:
    """A processor with None for what reads video and sound."""
    parts = {"image_processor": images, "tokenizer": tokenizer}
    lenient: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    made = lenient.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], dict(stated))
    made.__class__ = kind  # can be sent to other processes
    return made


class PixtralProcessor(ProcessorMixin):
    """Mistral 3's and Pixtral's: a token per merged patch, one at the end of each row and one at the end.

    Source: transformers 5.23, models/pixtral/processing_pixtral.py, whose import needs torchvision.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, patch_size: int = 16, spatial_merge_size: int = 1,
        chat_template: Any = None, image_token: str = "[IMG]", image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:  # fmt: skip
        begin: Any = super().__init__  # transformers gives it no types
        begin(image_processor, tokenizer, chat_template=chat_template)
        self.side, self.image_token = patch_size * spatial_merge_size, image_token
        self.row_end, self.image_end = image_break_token, image_end_token

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.side})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_options: Any) -> str:
        height, width = (int(side) // self.side for side in image_inputs["image_sizes"][image_idx])
        return ((self.image_token * width + self.row_end) * height).removesuffix(self.row_end) + self.image_end


class SmolVLMProcessor(ProcessorMixin):
    """SmolVLM's: a picture in tiles, row by row, then the whole of it, each with its marks.

    Source: transformers 5.23, models/smolvlm/processing_smolvlm.py, which needs a package for videos alone.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, image_seq_len: int = 169, chat_template: Any = None,
        **_others: Any,
    ) -> None:  # fmt: skip
        begin: Any = super().__init__
        begin(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = getattr(tokenizer, "image_token", "<image>")
        self.around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self.whole = getattr(tokenizer, "global_image_token", "<global-img>")
        self.image_seq_len = image_seq_len

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, *others: Any, **options: Any) -> Any:
        nested: Any = make_nested_list_of_images(images)
        return super().prepare_inputs_layout(nested, text, *others, **options)

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{"return_row_col_info": True, **options})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_options: Any) -> str:
        rows, columns = ([each for row in image_inputs[name] for each in row][image_idx] for name in ("rows", "cols"))
        part = self.image_token * self.image_seq_len
        tiles = (
            "".join(f"{self.around}<row_{row}_col_{column}>{part}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text = "".join(tiles) + "\n" if rows and columns else ""
        return f"{text}{self.around}{self.whole}{part}{self.around}"

    @property
    def unused_input_names(self) -> list[str]:
        return ["rows", "cols"]


def _blank(height: int, width: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (width, height))


def _refused(processor: Any, found: str) -> UsageError:
    return UsageError(
        f"{type(processor).__name__} {found}",
        expected="a processor whose tokens for an image depend only on its size",
        fix="choose another model.id, or train on text: remove the sources with images",
    )
