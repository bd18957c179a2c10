"""Turns rows with images into conversations: chats about images, and images with boxes to find. An image is a part of a
turn, {"type": "image"}, or `<image>` in a text; the part names it, or in order the row's image columns do."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from engine.config.schema.data import Source
from engine.data.conversations import TurnNames, conversation, conversation_of_pair, part_text
from engine.data.records import ChatRecord, Dropped, ImageReference, Record

PLACEHOLDER = "<image>"
"""Represents an image in the text of a turn, as in LLaVA's data sets."""

IMAGE_KEYS = ("image", "path", "url", "source")
"""Keys of an object that names an image, its path, or an object that does."""

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a content that are images: also of OpenAI's chats and of its responses."""

LARGEST_COORDINATE = 999
"""Boxes are written in thousandths of the image's width and height: 0 to 999."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of the image's width and height."""


@dataclass(frozen=True)
class BoxFormat:
    """How a detection source gives its boxes (order and scale of the numbers), the question, and the answer's style."""

    prompt: str
    order: str
    scale: str
    text: str

    @classmethod
    def of(cls, source: Source) -> BoxFormat | None:
        """None if the source is not a detection source."""
        if source.format != "detection":
            return None
        return cls(source.prompt or "", source.box_order or "", source.box_scale or "", source.box_text or "qwen2")


@dataclass(frozen=True)
class DetectionRecord:
    """An image and its boxes. The answer is written once the image's size is known."""

    image: ImageReference
    prompt: str
    boxes: tuple[tuple[float, ...], ...]
    labels: tuple[str, ...]
    format: BoxFormat

    def shares(self, height: int, width: int) -> list[Box]:
        """The boxes as fractions (0 to 1) of an image of `height` × `width` pixels."""
        return [_as_shares(box, self.format, height, width) for box in self.boxes]

    def conversation(self, height: int, width: int) -> ChatRecord | Dropped:
        """A question with the image (`height` × `width` pixels) and the boxes as the answer. Dropped if a box has no
        area or is not inside the image."""
        boxes = self.shares(height, width)
        if not all(0.0 <= x1 < x2 <= 1.0 and 0.0 <= y1 < y2 <= 1.0 for x1, y1, x2, y2 in boxes):
            return Dropped("a box has no area, or is outside its image")
        question: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": self.prompt}]
        answer = boxes_as_text(boxes, self.labels, self.format.text)
        asked: dict[str, Any] = {"role": "user", "content": question}
        return ChatRecord([asked, {"role": "assistant", "content": answer}], images=(self.image,))


def boxes_as_text(boxes: Sequence[Box], labels: Sequence[str], style: str) -> str:
    """The answer that names `boxes`, with one label each or none; coordinates are whole numbers from 0 to 999.

    Styles: "qwen2", <|object_ref_start|>LABEL<|object_ref_end|><|box_start|>(x1,y1),(x2,y2)<|box_end|> for each box, as
    Qwen2-VL was trained; "json", a list of {"bbox_2d": [x1, y1, x2, y2], "label": LABEL}.
    """
    whole = [[min(LARGEST_COORDINATE, int(1000 * share)) for share in box] for box in boxes]
    names: Sequence[str | None] = labels or [None] * len(boxes)
    if style == "json":
        found = [{"bbox_2d": box, **({} if name is None else {"label": name})}
                 for box, name in zip(whole, names, strict=True)]  # fmt: skip
        return json.dumps(found, ensure_ascii=False)
    return "".join(
        ("" if name is None else f"<|object_ref_start|>{name}<|object_ref_end|>")
        + f"<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
        for (x1, y1, x2, y2), name in zip(whole, names, strict=True)
    )


def image_chat(values: dict[str, Any], names: TurnNames | None = None) -> Record | Dropped:
    """The conversation of a row with `messages`, or with `prompt` and `completion`, and its images; `names` are what
    the source calls roles and keys of turns."""
    given = references([values.get("image"), values.get("images")])
    if isinstance(given, Dropped):
        return given
    if "prompt" in values:
        sides = (("prompt", "user"), ("completion", "assistant"))
        values = {**values, **{name: _as_turns(values[name], role) for name, role in sides}}
        record = conversation_of_pair(values, parts=True, names=names)
    else:
        record = conversation(values, parts=True, names=names)
    return _with_images(record, list(given)) if isinstance(record, ChatRecord) else record


def _as_turns(value: Any, role: str) -> Any:
    """A text, or the parts of one turn's content, as a list of one turn; None and lists of turns are unchanged."""
    is_turns = isinstance(value, list) and all(
        isinstance(each, dict) and {"role", "from"} & set(each) for each in value
    )
    return value if value is None or is_turns else [{"role": role, "content": value}]


def detection(values: dict[str, Any], boxes: BoxFormat) -> DetectionRecord | Dropped:
    """Dropped without exactly one image, without boxes or with malformed ones, or without one label per box."""
    images = references([values.get("image")])
    if isinstance(images, Dropped):
        return images
    if len(images) != 1:
        return Dropped("image is missing")
    corners, labels = values.get("boxes"), values.get("labels")
    if not isinstance(corners, list) or not corners:
        return Dropped("there is no box")
    if not all(isinstance(box, list) and len(box) == 4 and all(map(_is_number, box)) for box in corners):
        return Dropped("a box is not four numbers")
    if labels is not None and not (isinstance(labels, list) and len(labels) == len(corners)):
        return Dropped("there are not as many labels as boxes")
    names = tuple(str(label) for label in labels or ())
    return DetectionRecord(images[0], boxes.prompt, tuple(map(tuple, corners)), names, boxes)


def references(columns: Sequence[Any]) -> tuple[ImageReference, ...] | Dropped:
    """Values are what `_reference` takes, or a list of these; Dropped if one is none of them."""
    found = []
    for value in _flat(columns):
        reference = _reference(value)
        if isinstance(reference, Dropped):
            return reference
        if reference is None:
            return Dropped(NO_IMAGE)
        found.append(reference)
    return tuple(found)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        elif value is not None:
            yield value


DATA_URL = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)

IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*", b"\x00\x00\x00")
"""First bytes of image files, by which text in base64 is distinguished from a path: PNG, JPEG, GIF, WebP,
BMP, TIFF, AVIF."""

SHORTEST_ENCODED = 64
"""Characters of text in base64; a shorter text is a path."""

NO_IMAGE = "an image is neither a path nor the bytes of a file"
WEB_ADDRESS = "an image is a web address, which is not downloaded: save the file next to the data"
NOT_BASE64 = "the text of an image is not base64"
"""Reasons for which a row is dropped."""


def _reference(value: Any) -> ImageReference | Dropped | None:
    """The image that a value names: a path, bytes, a data URL, base64 text, or an object with one of these; Dropped for
    what cannot be read, None for what names no image."""
    if isinstance(value, str) and value:
        return _reference_of_text(value)
    if isinstance(value, bytes):
        return ImageReference(data=value)
    if not isinstance(value, dict):
        return None
    # Anthropic's blocks: {"type": "base64", "media_type": …, "data": …} or {"type": "url", "url": …} as the source.
    for key in ("bytes", "data", "base64"):
        inner = value.get(key)
        if isinstance(inner, bytes):
            return ImageReference(data=inner)
        if isinstance(inner, str) and inner:
            return _reference_of_text(inner) if inner.startswith("data:") else _from_base64(inner)
    return _reference(next((value[key] for key in IMAGE_KEYS if value.get(key)), None))


def _reference_of_text(text: str) -> ImageReference | Dropped:
    if match := DATA_URL.match(text):
        data = text[match.end() :]
        return _from_base64(data) if match[1] else ImageReference(data=unquote_to_bytes(data))
    if re.match(r"https?://", text, re.IGNORECASE):
        return Dropped(WEB_ADDRESS)
    found = _from_base64(text) if len(text) >= SHORTEST_ENCODED else None
    if isinstance(found, ImageReference) and found.data is not None and found.data.startswith(IMAGE_STARTS):
        return found
    return ImageReference(path=text.removeprefix("file://"))


def _from_base64(text: str) -> ImageReference | Dropped:
    """Decode it, also base64 for URLs, without its padding, or in lines."""
    packed = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return ImageReference(data=base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True))
    except ValueError:
        return Dropped(NOT_BASE64)


def _with_images(record: ChatRecord, given: list[ImageReference]) -> ChatRecord | Dropped:
    """Give `given`, the images of the row, in order to the image parts that name none; without such a part, put them
    before the user's first text. Dropped if they are more or fewer than parts, or an image is part of an answer."""
    waiting, images, messages = list(given), [], []
    turns = [{**message, "content": _parts(message["content"])} for message in record.messages]
    if given and not any(part["type"] == "image" and "image" not in part for part in _all_parts(turns)):
        first = next((turn for turn in turns if turn["role"] == "user"), None)
        if first is None:
            return Dropped("there are images, and no turn of the user")
        first["content"] = [{"type": "image"} for _ in given] + first["content"]
    for turn in turns:
        content = []
        for part in turn["content"]:
            if part["type"] not in ("image", "text"):
                return Dropped(f"a turn has a part of the type {str(part['type'])[:40]!r}")
            if part["type"] == "image":
                if turn["role"] == "assistant":
                    return Dropped("an image is part of an answer")
                named = part.get("image")
                if isinstance(named, Dropped):
                    return named
                if "image" not in part and not waiting:
                    return Dropped("a turn has more images than the row")
                images.append(part["image"] if "image" in part else waiting.pop(0))
            content.append({"type": "image"} if part["type"] == "image" else part)
        plain = all(part["type"] == "text" for part in content)
        messages.append({**turn, "content": "".join(part["text"] for part in content) if plain else content})
    if waiting:
        return Dropped("the row has more images than its turns")
    return replace(record, messages=messages, images=tuple(images))


def _parts(content: Any) -> list[dict[str, Any]]:
    """Parts of the types image and text; an image part has an ImageReference as "image" where it names one. A part that
    is neither keeps its type."""
    if isinstance(content, str):
        texts = content.split(PLACEHOLDER)
        return [part for number, text in enumerate(texts)
                for part in [*([{"type": "image"}] if number else []), {"type": "text", "text": text}]
                if part["type"] == "image" or part["text"]]  # fmt: skip
    found: list[dict[str, Any]] = []
    for part in content:
        kind, text = part.get("type") if isinstance(part, dict) else None, part_text(part)
        if text is not None:
            found.append({"type": "text", "text": text})
        elif kind in IMAGE_PARTS:
            named = _reference(part if kind == "image" else part.get("image_url"))
            if named is None and any(part.get(key) for key in (*IMAGE_KEYS, "image_url", "file_id")):
                named = Dropped(NO_IMAGE)
            found.append({"type": "image"} if named is None else {"type": "image", "image": named})
        else:
            found.append({"type": kind})
    return found


def _all_parts(turns: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for turn in turns:
        yield from turn["content"]


def _as_shares(box: tuple[float, ...], source: BoxFormat, height: int, width: int) -> Box:
    """Fractions (0 to 1) of an image of `height` × `width` pixels."""
    high, wide = {"unit": (1.0, 1.0), "pixels": (height, width), "thousand": (1000.0, 1000.0)}[source.scale]
    first, second, third, fourth = box
    if source.order == "yxyx":
        first, second, third, fourth = second, first, fourth, third
    elif source.order == "xywh":
        third, fourth = first + third, second + fourth
    return first / wide, second / high, third / wide, fourth / high


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
