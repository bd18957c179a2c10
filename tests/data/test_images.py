"""Rows with images: their tokens, their pixels, which rows are dropped, and that a changed image file is noticed."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from engine.commands.data import _as_cells, in_half_blocks, in_letters
from engine.config.schema.data import Source
from engine.config.schema.run import RunSpec
from engine.data.batch import collate
from engine.data.image_formats import boxes_as_text
from engine.data.images import TOO_MANY_PIXELS, UNREADABLE, decoded
from engine.data.prepare import PreparedData, prepare_data
from engine.data.sources import open_rows
from engine.data.tokens import IGNORED
from engine.errors import DataError
from engine.model.tokenizer import load_image_processor, load_tokenizer
from tests.budget.metered_step import run_spec
from tests.present import present
from tests.vision_models import detection_source, write_boxes, write_gemma3, write_qwen2_vl
from tui.launch.samples import sample_lines


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    yield


def spec_for(model: Path, source: dict[str, Any], **data: Any) -> RunSpec:
    asked = {"tokenizer": str(model), "init": "pretrained"}
    return run_spec(str(model), model=asked, data={"sources": [source], "max_length": 256, **data})


def prepared(model: Path, source: dict[str, Any], **data: Any) -> PreparedData:
    spec = spec_for(model, source, **data)
    tokenizer = load_tokenizer(spec.recipe.model)
    return prepare_data(spec, tokenizer, load_image_processor(spec, tokenizer))


def chat_file(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "chat", "path": str(path), "format": "image-chat"}


def pictures(folder: Path, *sizes: tuple[int, int]) -> list[str]:
    """Files of plain images of some (width, height), each of its own colour."""
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (40 * number, 100, 200)).save(folder / f"{number}.png")
    return [f"{number}.png" for number in range(len(sizes))]


def test_an_image_takes_the_tokens_of_its_patches_and_none_of_them_is_learned(qwen: Path, tmp_path: Path) -> None:
    small, wide = pictures(tmp_path, (56, 56), (140, 56))
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
             {"role": "assistant", "content": "A plane."}]  # fmt: skip
    source = chat_file(tmp_path, [{"messages": turns, "image": small}, {"messages": turns, "image": wide}])
    tokenizer = load_tokenizer(run_spec(str(qwen), model={"tokenizer": str(qwen)}).recipe.model)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for loss_on in ("completion", "all"):
        data = prepared(qwen, source, loss_on=loss_on).train
        rows = [example.input_ids for example in data]
        assert [int((ids == pad).sum()) for ids in rows] == [4, 10]
        assert all((example.labels[example.input_ids == pad] == IGNORED).all() for example in data)
        assert tokenizer.decode(rows[0]) == (
            "<user><|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>What?<end><assistant>A plane.<end>"
        )
    asked, answer = data.split_question(1)
    assert tokenizer.decode(answer) == "A plane.<end>" and str(tokenizer.decode(asked)).endswith("<assistant>")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "x"}]},
        {"prompt": "What?", "completion": "x"},
    ],
    ids=["placeholder in the text", "sharegpt, before the first question", "prompt and completion"],
)
def test_images_of_the_row_go_where_the_turns_want_them(qwen: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    (image,) = pictures(tmp_path, (56, 56))
    data = prepared(qwen, chat_file(tmp_path, [{**row, "images": [image]}])).train
    tokenizer = load_tokenizer(run_spec(str(qwen), model={"tokenizer": str(qwen)}).recipe.model)
    text = str(tokenizer.decode(data[0].input_ids))
    assert text.startswith("<user><|vision_start|>") and "<|vision_end|>What?<end>" in text


def test_bytes_in_the_rows_and_parts_that_name_their_image(qwen: Path, tmp_path: Path) -> None:
    import datasets

    (image,) = pictures(tmp_path, (56, 84))
    stored = {"image": {"bytes": (tmp_path / image).read_bytes(), "path": None}, "prompt": "What?", "completion": "x"}
    datasets.Dataset.from_list([stored], features=datasets.Features({
        "image": datasets.Image(), "prompt": datasets.Value("string"), "completion": datasets.Value("string"),
    })).to_parquet(tmp_path / "rows.parquet")  # fmt: skip
    source = {"name": "rows", "path": str(tmp_path / "rows.parquet"), "format": "image-chat"}
    inside = prepared(qwen, source).train
    turns = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]},
             {"role": "assistant", "content": "x"}]  # fmt: skip
    named = prepared(qwen, chat_file(tmp_path, [{"messages": turns}])).train
    assert inside[0].input_ids.tolist() == named[0].input_ids.tolist()
    both = [collate(data, [0], pad_id=258).images["pixel_values"] for data in (inside, named)]
    assert np.array_equal(both[0], both[1])


def test_each_row_of_a_micro_batch_gets_its_own_pixels(qwen: Path, tmp_path: Path) -> None:
    """All images have one size, so that swapped pixels would fit as well."""
    path = write_boxes(tmp_path, count=6)
    data = prepared(qwen, detection_source(path)).train
    processor = present(load_image_processor(spec_for(qwen, detection_source(path)), load_tokenizer(
        run_spec(str(qwen), model={"tokenizer": str(qwen)}).recipe.model)))  # fmt: skip
    rows = [4, 0, 5]
    batch = collate(data, rows, pad_id=258)
    expected = [processor.pixels(Image.open(tmp_path / "images" / f"{row}.png").convert("RGB")) for row in rows]
    assert np.array_equal(batch.images["pixel_values"], np.concatenate([one["pixel_values"] for one in expected]))
    assert batch.images["image_grid_thw"].tolist() == [[1, 6, 8]] * 3
    types_BS = batch.images["mm_token_type_ids"]
    assert types_BS.shape == batch.input_ids_BS.shape and types_BS.sum(1).tolist() == [12] * 3


def test_gemmas_image_is_written_as_its_processor_writes_it(tmp_path: Path) -> None:
    model = write_gemma3(tmp_path / "model")
    (image,) = pictures(tmp_path, (90, 50))
    data = prepared(model, chat_file(tmp_path, [{"image": image, "prompt": "What?", "completion": "x"}])).train
    tokenizer = load_tokenizer(run_spec(str(model), model={"tokenizer": str(model)}).recipe.model)
    text = str(tokenizer.decode(data[0].input_ids))
    assert text.startswith("<user>\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\nWhat?<end>")
    batch = collate(data, [0], pad_id=258)
    assert batch.images["pixel_values"].shape == (1, 3, 28, 28) and int(batch.images["token_type_ids"].sum()) == 4


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_several_images_of_a_row_stand_where_its_turns_name_them(family: str, tmp_path: Path) -> None:
    model = {"qwen2_vl": write_qwen2_vl, "gemma3": write_gemma3}[family](tmp_path / "model")
    small, wide = pictures(tmp_path, (56, 56), (140, 56))
    turns = [{"role": "user", "content": "A<image>B"}, {"role": "assistant", "content": "x"},
             {"role": "user", "content": "C<image>D"}, {"role": "assistant", "content": "y"}]  # fmt: skip
    rows = [{"messages": turns, "images": names} for names in ([small, wide], [wide, small])]
    spec = spec_for(model, chat_file(tmp_path, rows))
    tokenizer = load_tokenizer(spec.recipe.model)
    processor = present(load_image_processor(spec, tokenizer))
    assert "Pil" in type(processor.processor).__name__  # whatever else is installed
    data = prepare_data(spec, tokenizer, processor).train
    part = str(tokenizer.convert_ids_to_tokens(processor.token_id))
    for row, names in enumerate(([small, wide], [wide, small])):
        pieces = str(tokenizer.decode(data[row].input_ids)).split("C")
        expected = [4 if family == "gemma3" or name == small else 10 for name in names]
        assert [piece.count(part) for piece in pieces] == expected
        assert pieces[0].startswith("<user>A") and "B<end><assistant>x<end>" in pieces[0] and "D<end>" in pieces[1]
    batch = collate(data, [1, 0], pad_id=258)
    images = [decoded((tmp_path / name).read_bytes()) for name in (wide, small, small, wide)]
    expected_pixels = np.concatenate([processor.pixels(image)["pixel_values"] for image in images])
    assert np.array_equal(batch.images["pixel_values"], expected_pixels)
    types_BS = batch.images["token_type_ids" if family == "gemma3" else "mm_token_type_ids"]
    assert torch.equal(types_BS == 1, batch.input_ids_BS == processor.token_id)


BOX = (0.1, 0.2, 0.5, 0.75)


@pytest.mark.parametrize(
    ("order", "scale", "numbers"),
    [
        ("xyxy", "unit", [0.1, 0.2, 0.5, 0.75]),
        ("yxyx", "unit", [0.2, 0.1, 0.75, 0.5]),
        ("xywh", "unit", [0.1, 0.2, 0.4, 0.55]),
        ("xyxy", "pixels", [20.0, 20.0, 100.0, 75.0]),
        ("xyxy", "thousand", [100, 200, 500, 750]),
    ],
)
def test_boxes_in_every_order_and_scale_give_one_answer(
    qwen: Path, tmp_path: Path, order: str, scale: str, numbers: list[float]
) -> None:
    (image,) = pictures(tmp_path, (200, 100))
    (tmp_path / "data.jsonl").write_text(json.dumps({"image": image, "boxes": [numbers], "labels": ["cup"]}) + "\n")
    source = detection_source(tmp_path / "data.jsonl", columns={}, box_order=order, box_scale=scale)
    data = prepared(qwen, source).train
    tokenizer = load_tokenizer(run_spec(str(qwen), model={"tokenizer": str(qwen)}).recipe.model)
    answer = tokenizer.decode(data.split_question(0)[1])
    assert answer == boxes_as_text([BOX], ["cup"], "qwen2") + "<end>"
    assert answer == "<|object_ref_start|>cup<|object_ref_end|><|box_start|>(100,200),(500,750)<|box_end|><end>"
    assert boxes_as_text([BOX], ["cup"], "json") == '[{"bbox_2d": [100, 200, 500, 750], "label": "cup"}]'


def test_rows_without_a_usable_image_or_box_are_dropped_and_counted(qwen: Path, tmp_path: Path) -> None:
    (image,) = pictures(tmp_path, (100, 100))
    whole = (tmp_path / image).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    good = [0.1, 0.1, 0.5, 0.5]
    rows = [
        {"image": image, "boxes": [good]}, {"image": "gone.png", "boxes": [good]},
        {"image": "cut.png", "boxes": [good]},
        {"image": "text.png", "boxes": [good]}, {"image": image, "boxes": []}, {"image": None, "boxes": [good]},
        {"image": image, "boxes": [[0.5, 0.1, 0.5, 0.5]]}, {"image": image, "boxes": [[0.1, 0.1, 1.5, 0.5]]},
        {"image": image, "boxes": [[0.1, 0.1, 0.5]]},
    ]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = detection_source(tmp_path / "data.jsonl", columns={}, box_order="xyxy")
    (count,) = prepared(qwen, source).report.sources
    assert (count.read, count.kept) == (9, 1)
    assert count.dropped == {
        "image cannot be read (FileNotFoundError)": 1, "image cannot be read (OSError)": 1,
        "image cannot be read (UnidentifiedImageError)": 1, "there is no box": 1, "image is missing": 1,
        "a box has no area, or is outside its image": 2, "a box is not four numbers": 1,
    }  # fmt: skip


def test_a_row_is_never_cut_inside_its_image(qwen: Path, tmp_path: Path) -> None:
    (image,) = pictures(tmp_path, (112, 112))
    row = {"image": image, "prompt": "What?", "completion": "x" * 100}
    source = chat_file(tmp_path, [row, {**row, "prompt": "y" * 40 + "<image>"}])
    found = prepared(qwen, source, max_length=40, over_length="truncate")
    assert found.report.sources[0].dropped == {"longer than data.max_length, image tokens are not cut": 1}
    assert found.train.lengths.tolist() == [40]


def test_a_sample_is_shown_as_a_small_picture_with_its_boxes(qwen: Path, tmp_path: Path) -> None:
    Image.new("RGB", (200, 100), (255, 255, 255)).save(tmp_path / "white.png")
    row = {"image": "white.png", "boxes": [[0.25, 0.25, 0.75, 0.75]]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    source = detection_source(tmp_path / "data.jsonl", columns={}, box_order="xyxy")
    (picture,) = prepared(qwen, source).train.pictures_of(0)
    assert picture.shape == (24, 48, 3)
    rows = in_letters(picture).plain.splitlines()
    edge, side = "  " + "@" * 12 + "X" * 25 + "@" * 11, "  " + "@" * 12 + "X" + "@" * 23 + "X" + "@" * 11
    assert rows == ["  " + "@" * 48] * 3 + [edge] + [side] * 5 + [edge] + ["  " + "@" * 48] * 2
    blocks = in_half_blocks(picture)
    assert blocks.plain.count("▀") == 12 * 48
    assert {str(span.style) for span in blocks.spans} == {
        f"rgb({above}) on rgb({below})" for above, below in (
            ("255,255,255", "255,255,255"), ("255,0,60", "255,255,255"), ("255,0,60", "255,0,60"),
        )
    }  # fmt: skip
    cells = _as_cells([picture])[0]
    assert (len(cells), len(cells[0])) == (12, 48) and cells[0][0] == [[255] * 3] * 2
    report = json.loads(json.dumps({"samples": [{"source": "a", "tokens": 1, "target_tokens": 1, "pieces": [],
                                                 "pictures": [cells]}]}))  # fmt: skip
    drawn = sample_lines(report, 80, ascii_only=False, letters=True)[-12:]
    assert [line.plain for line in drawn] == [row.strip() for row in rows]
    assert [line.plain for line in sample_lines(report, 80, ascii_only=False, letters=False)[-12:]] == ["▀" * 48] * 12
    in_the_rows = chat_file(tmp_path, [{"prompt": "What?", "completion": "x", "image": "white.png"}])
    (plain,) = prepared(qwen, in_the_rows).train.pictures_of(0)
    assert (plain == 255).all()


def test_an_image_that_changed_is_noticed(qwen: Path, tmp_path: Path) -> None:
    path = write_boxes(tmp_path, count=2)
    before = prepared(qwen, detection_source(path))
    image = tmp_path / "images" / "0.png"
    Image.new("RGB", (112, 84), (1, 2, 3)).save(image)
    with pytest.raises(DataError, match="its bytes have changed"):
        collate(before.train, [0], pad_id=258)
    collate(before.train, [1], pad_id=258)
    os.utime(image, ns=(1, 1))
    assert prepared(qwen, detection_source(path)).fingerprint != before.fingerprint
    image.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        collate(before.train, [0], pad_id=258)


def empty_png(width: int, height: int) -> bytes:
    """A PNG whose header states a size, and with no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_beyond_its_bound_is_dropped_before_it_is_decoded(qwen: Path, tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    for side in (9_000, 10_000, 40_000):
        (tmp_path / f"{side}.png").write_bytes(empty_png(side, side))
    rows = [
        {"image": name, "prompt": "What?", "completion": "x"}
        for name in ("0.png", "9000.png", "10000.png", "40000.png")
    ]
    (count,) = prepared(qwen, chat_file(tmp_path, rows)).report.sources
    assert (count.kept, count.dropped) == (1, {TOO_MANY_PIXELS: 3})


def test_only_regular_files_are_opened_as_images(qwen: Path, tmp_path: Path) -> None:
    pictures(tmp_path, (56, 56))
    os.mkfifo(tmp_path / "pipe.png")
    names = ["0.png", "pipe.png", "/dev/zero", "a\x00b.png", "~nobody-at-all/x.png", "x" * 5_000, "."]
    rows = [{"image": name, "prompt": "What?", "completion": "x"} for name in names]
    (count,) = prepared(qwen, chat_file(tmp_path, rows)).report.sources
    assert (count.kept, sum(count.dropped.values())) == (1, 6)
    assert all(reason.startswith(UNREADABLE) for reason in count.dropped)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
@pytest.mark.parametrize("whole", [True, False], ids=["folder", "file"])
def test_a_folder_of_images_is_read_by_its_metadata(qwen: Path, tmp_path: Path, name: str, whole: bool) -> None:
    """The layout of `imagefolder`: paths start from the folder of the table, and a cell of digits stays text."""
    folder = tmp_path / "scans"
    folder.mkdir()
    pictures(folder, (56, 56), (84, 56), (84, 84))
    rows = [{"file_name": f"{number}.png", "prompt": "Which?", "completion": f"00{number}"} for number in range(3)]
    if name.endswith("csv"):
        (folder / name).write_text(
            "file_name,prompt,completion\n" + "".join(f"{','.join(row.values())}\n" for row in rows)
        )
    elif name.endswith("jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    source = {"name": "scans", "path": str(folder if whole else folder / name), "format": "image-chat"}
    found = prepared(qwen, source)
    assert present(found.train.patches).tolist() == [16, 24, 36] and not found.report.notices
    tokenizer = load_tokenizer(spec_for(qwen, source).recipe.model)
    answers = [str(tokenizer.decode(found.train.split_question(row)[1], skip_special_tokens=True)) for row in range(3)]
    assert [answer.strip() for answer in answers] == ["000", "001", "002"]


def test_metadata_of_images_are_read_as_json_and_by_split(qwen: Path, tmp_path: Path) -> None:
    folder, answers = tmp_path / "scans", {"train": ["2021-03-05", "1.0"], "test": ["2022-01-01", "7"]}
    for split, texts in answers.items():
        (folder / split).mkdir(parents=True)
        pictures(folder / split, (56, 56), (84, 56))
        rows = [{"file_name": f"{number}.png", "prompt": "Which?", "completion": text, "facts": {text: number}}
                for number, text in enumerate(texts)]  # fmt: skip
        (folder / split / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, texts in answers.items():
        source = {"name": "scans", "path": str(folder), "split": split, "format": "image-chat"}
        found = open_rows(Source.model_validate(source), seed=0)
        (first, second) = found.rows(0, 2)
        assert [(row["completion"], row["facts"]) for row in (first, second) if isinstance(row, dict)] == [
            (texts[0], {texts[0]: 0}), (texts[1], {texts[1]: 1})
        ]  # fmt: skip
        assert prepared(qwen, source).train.patches is not None
    with pytest.raises(DataError, match="has no split validation"):
        open_rows(Source.model_validate({**source, "split": "validation"}), seed=0)


def test_images_that_a_format_leaves_out_are_told(qwen: Path, tmp_path: Path) -> None:
    (image,) = pictures(tmp_path, (28, 28))
    source = chat_file(tmp_path, [{"image": image, "prompt": "Which?", "completion": "A box."}])
    (notice,) = prepared(qwen, {**source, "format": "auto"}).report.notices
    assert "image is not read" in notice and '"image-chat"' in notice
