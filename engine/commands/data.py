"""`tunedeck data`: shows what a recipe's data look like to the model: tokens, the label mask (target tokens), lengths,
what was dropped and why. Loads no model; text from the data is escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import (
    JsonOption,
    OverridesOption,
    RecipeOption,
    importing,
    make_console,
    print_json,
    print_line,
    print_notices,
    print_progress,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from engine.config.schema.recipe import Recipe
    from engine.config.schema.run import RunSpec
    from engine.data.prepare import DuplicateRow, PreparedData
    from engine.data.report import PartReport, Quality
    from engine.data.tokens import TokenData

BAR_WIDTH = 40

LEARNED_STYLE = "bold underline green"
"""Marks target tokens on a terminal with colour; elsewhere they stand between marks."""

SPECIAL_STYLE = "cyan"
"""Marks special tokens."""

BRIGHTNESS = " .:-=+*#%@"
"""Characters for pixels on a terminal without colours, from black to white."""

DEFAULT_PROFILE = "24gb"
"""A recipe resolves only with a profile, and tokens do not depend on which. On a GPU no key of a recipe is refused:
4-bit weights, for example, are on the simulated device."""

ProfileForDataOption = Annotated[
    str | None,
    typer.Option(
        "-p", "--profile", metavar="PROFILE", help="Hardware profile whose overrides apply.", show_default=False
    ),
]
ShowOption = Annotated[
    int, typer.Option("--show", min=0, metavar="N", help="How many samples to show, with target tokens marked.")
]


RowOption = Annotated[
    int | None, typer.Option("--row", min=1, metavar="N", help="Start at sample number N.", show_default=False)
]
FindOption = Annotated[
    str | None,
    typer.Option("--find", metavar="TEXT", help="Show samples whose text contains TEXT.", show_default=False),
]
PrepareOption = Annotated[
    bool, typer.Option("--prepare", help="Only tokenise the data, so that a run finds it in the cache.")
]


DuplicatesOption = Annotated[
    bool, typer.Option("--duplicates", help="Show held-out rows that are equal or similar to training rows.")
]


StageOfDataOption = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Show only this stage of a recipe with stages.", show_default=False),
]


def data(
    recipe: RecipeOption,
    overrides: OverridesOption = None,
    show: ShowOption = 2,
    row: RowOption = None,
    find: FindOption = None,
    stage: StageOfDataOption = None,
    prepare: PrepareOption = False,
    duplicates: DuplicatesOption = False,
    profile: ProfileForDataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a recipe's data as the model will see it. Also target tokens, lengths, and what was dropped and why."""
    from engine.checks.run import DATA, check_runs, require_all
    from engine.config.load import resolve
    from engine.errors import UsageError

    # Before the imports, which take seconds.
    resolved = resolve(profile or DEFAULT_PROFILE, recipe, overrides or ())
    specs = data_specs(resolved.spec, stage)
    if len(specs) > 1 and (row is not None or find is not None):
        raise UsageError("--row and --find need one stage of this recipe", fix=f"add --stage {list(specs)[-1]}")
    runs = check_runs(resolved.spec, DATA)
    require_all(runs)
    print_notices(dict.fromkeys(notice for run in runs for notice in run.reported))
    with importing():
        from engine.data.prepare import prepare_data
        from engine.model.config import check_packing
        from engine.model.tokenizer import load_image_processor, load_tokenizer

    documents = {}
    for name, spec in specs.items():
        tokenizer = load_tokenizer(spec.recipe.model)
        check_packing(spec)
        images = load_image_processor(spec, tokenizer)
        prepared = prepare_data(
            spec, tokenizer, images, notify=lambda text: print_progress(escape(text)), for_report=True
        )
        if len(specs) > 1 and not as_json:
            print_line(f"{'' if name == next(iter(specs)) else chr(10)}stage {name}")
        if prepare and not as_json:
            print_parts(prepared)
            continue
        rows = [] if prepare or duplicates else chosen_rows(prepared.train, tokenizer, show, row, find)
        figures = figures_of(prepared, tokenizer, spec.recipe)
        if as_json:
            documents[name] = report_document(prepared, tokenizer, rows, figures)
        else:
            print_report(prepared, tokenizer, rows, figures)
            if duplicates:
                print_duplicates(prepared, tokenizer)
            for line in ("", *prepared.report.accounts()):
                print_line(escape(line))
    if as_json:
        print_json({"stages": documents} if len(specs) > 1 else documents.popitem()[1], indent=None)


def data_specs(spec: RunSpec, stage: str | None) -> dict[str, RunSpec]:
    """What is read, by stage: `spec` itself, or of a recipe with stages those that train, or `stage` alone. Raises
    UsageError if there is no such enabled stage."""
    from engine.budget.advise.staged_plan import reading_spec
    from engine.config.stages import enabled_stage, enabled_stages

    if stage is not None:
        chosen = [enabled_stage(spec.recipe, stage)]
    else:
        chosen = [each for _, each in enabled_stages(spec.recipe) if each.kind == "train"]
    return {each.name: reading_spec(spec, each) for each in chosen} or {"": spec}


def chosen_rows(
    data: TokenData, tokenizer: PreTrainedTokenizerBase, show: int, row: int | None, find: str | None
) -> list[int]:
    """Up to `show` samples, from 0: those that contain `find`, else those from number `row` (from 1) on; of pairs, both
    sequences. Raises UsageError if there is none."""
    from engine.data.report import find_rows
    from engine.errors import UsageError

    sides = 2 if data.in_pairs else 1
    first, show = sides * ((row or 1) - 1), sides * show
    if first >= len(data):
        raise UsageError(
            f"--row {row}: the training data has {len(data) // sides:,} samples", fix=f"add --row {len(data) // sides}"
        )
    if find is None:
        return list(range(first, min(first + show, len(data))))
    found = find_rows(data, tokenizer, find, show, first)
    if show and not found:
        behind = f" from sample {row}" if row else ""
        raise UsageError(
            f"--find: no sample{behind} contains this text",
            fix="search for a shorter part; upper and lower case matter",
        )
    return found


def figures_of(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Quality:
    """Padding, packing, ends and duplicates of the training data."""
    from engine.data.report import quality

    lost = sum(count.lost_tokens for count in prepared.report.sources)
    length, batch = recipe.data.max_length, recipe.train.batch_size
    return quality(
        prepared.train, tokenizer, max_length=length, batch_size=batch, lost_tokens=lost, counts=prepared.report.sources
    )


def report_document(
    prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int], figures: Quality | None = None
) -> dict[str, Any]:
    """`rows`: numbers of the samples to show, from 0."""
    from engine.data.chat_template import special_texts

    return {
        "fingerprint": prepared.fingerprint,
        **prepared.report.as_json(),
        "quality": {**asdict(figures), "lines": figures.lines()} if figures else None,
        "overlap": [{**asdict(overlap), "pairs": len(overlap.pairs)} for overlap in prepared.overlaps],
        "duplicates": [
            {
                "held_out": _duplicate(pair.held_out, tokenizer),
                "other": _duplicate(pair.other, tokenizer),
                "similarity": pair.similarity,
            }
            for pair in prepared.shown
        ],
        "special_tokens": sorted(special_texts(tokenizer)),
        "samples": [
            {
                "number": row + 1,
                **_sample(prepared.train, row, tokenizer),
                "pictures": _as_cells(prepared.train.pictures_of(row)),
            }
            for row in rows
        ],
    }


def _duplicate(row: DuplicateRow, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    text = str(tokenizer.decode(row.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return {"part": row.part, "source": row.source, "place": row.place, "text": text}


DUPLICATE_LENGTH = 300
"""Characters of a duplicate that are shown."""


def print_duplicates(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print each pair of rows: how alike they are, where they are, and their texts, one text if they are equal."""
    console = make_console(soft_wrap=True)
    if not prepared.overlaps:
        console.print("there are no held-out rows: set data.valid_fraction or data.validation")
    for pair in prepared.shown:
        is_equal = pair.similarity == 1
        console.print()
        for row in (pair.held_out, pair.other):
            console.print(escape(f"{row.part}, {row.source}, {row.place}"))
            if row is pair.held_out or not is_equal:
                text = escape(_duplicate(row, tokenizer)["text"])
                console.print("  " + text[:DUPLICATE_LENGTH] + ("…" if len(text) > DUPLICATE_LENGTH else ""))
        console.print("equal" if is_equal else f"{100 * pair.similarity:.0f} % similar")


def print_parts(prepared: PreparedData) -> None:
    """A line for each part: what a run will find in the cache."""
    for part in prepared.report.parts:
        print_line(f"{part.part}: {part.rows:,} sequences, {part.tokens:,} tokens are in the cache")


def print_report(
    prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int], figures: Quality | None = None
) -> None:
    """`rows`: numbers of the samples to show, from 0."""
    from engine.data.chat_template import special_texts

    console = make_console(soft_wrap=True)
    _print_sources(console, prepared)
    for notice in (*prepared.report.notices, *prepared.report.overlaps):
        console.print(escape(notice), style="bold red" if notice.startswith("WARNING") else None)
    for part in prepared.report.parts:
        _print_part(console, part)
    if figures is not None:
        console.print()
        for line in figures.lines():
            console.print(escape(line), style="bold red" if line.startswith("WARNING") else None)
    specials = [escape(text) for text in special_texts(tokenizer)]
    marked = not console.is_terminal or console.no_color
    for row in rows:
        sample = _sample(prepared.train, row, tokenizer)
        console.print()
        console.print(
            f"{_name_of(prepared.train, row)} of {sample['source']}: {sample['tokens']} tokens, "
            f"{sample['target_tokens']} target tokens" + (" (in marks)" if marked else " (underlined)")
        )
        text = _highlighted(sample["pieces"], marks=_marks(console) if marked else None)
        text.highlight_words(specials, SPECIAL_STYLE)
        console.print(text)
        for picture in prepared.train.pictures_of(row):
            console.print(in_letters(picture) if marked or not _unicode(console) else in_half_blocks(picture))


def _name_of(data: TokenData, row: int) -> str:
    """Such as "sample 3", of a pair "sample 2, rejected", or with labels "sample 2, undesirable"."""
    if data.mismatched is not None:
        return f"sample {row + 1}, {'desirable' if data.desirable[row] else 'undesirable'}"
    return f"sample {row // 2 + 1}, {('chosen', 'rejected')[row % 2]}" if data.in_pairs else f"sample {row + 1}"


def _print_sources(console: Console, prepared: PreparedData) -> None:
    from rich.table import Table
    from rich.text import Text

    from engine.data.report import drop_lines, rendering_lines

    table = Table("source", "used for", "format", box=None, pad_edge=False)
    for title in ("read", "kept", "cut", "dropped"):
        table.add_column(title, justify="right")
    report = prepared.report
    sides = (("training", report.sources), ("validation", report.validation_sources))
    reasons = []
    for side, counts in sides:
        for count in counts:
            numbers = (count.read, count.kept, count.truncated, sum(count.dropped.values()))
            table.add_row(*(Text(cell) for cell in (count.name, side, count.format, *(f"{n:,}" for n in numbers))))
            reasons += [f"dropped from {count.name}: {line}" for line in drop_lines([count])] + rendering_lines(count)
    console.print(table)
    for line in reasons:
        console.print(escape(line))


def _print_part(console: Console, part: PartReport) -> None:
    packed = f", packed from {part.documents:,} samples" if part.packed else ""
    console.print()
    console.print(
        f"{part.part}: {part.rows:,} sequences{packed}; {part.tokens:,} tokens, "
        f"{part.target_tokens:,} of them target tokens ({100 * part.target_share:.1f} %)"
    )
    most = "≤" if _unicode(console) else "<="
    lengths = ", ".join(f"{share} % {most} {length:,}" for share, length in part.percentiles.items())
    console.print(f"tokens per sequence: {lengths}")
    for line in histogram_lines(part.histogram, bar="█" if _unicode(console) else "#"):
        console.print(line)


def histogram_lines(bars: list[tuple[int, int, int]], *, bar: str) -> list[str]:
    """A line per bar: the range of lengths, the bar drawn with `bar`, the count; `bars` has (first length, last length,
    count). A count above zero gets at least one character."""
    most = max(count for _, _, count in bars)
    digits = len(f"{max(last for _, last, _ in bars):,}")
    return [
        f"{first:>{digits},} - {last:>{digits},}  {bar * (-(-count * BAR_WIDTH // most)):<{BAR_WIDTH}}  {count:,}"
        for first, last, count in bars
    ]


def _sample(rows: TokenData, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Its text is split into pieces that are either target tokens or masked."""
    example = rows[row]
    documents = example.segments if example.segments is not None else [0] * len(example.input_ids)
    keys = [(int(document), bool(label != -100)) for document, label in zip(documents, example.labels, strict=True)]
    pieces = []
    for (document, learned), group in groupby(enumerate(keys), key=lambda entry: entry[1]):
        ids = [int(example.input_ids[place]) for place, _ in group]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append({"text": text, "learned": learned, "document": document})
    return {
        "source": rows.source_names[int(rows.source_of[row])],
        "tokens": len(example.input_ids),
        "target_tokens": int(rows.target_counts[row]),
        "pieces": pieces,
    }


def _as_cells(pictures: list[NDArray[np.uint8]]) -> list[list[list[list[list[int]]]]]:
    """uint8[rows, columns, 3] as lines of cells, the character's two pixels [upper, lower], each [red, green, blue].
    The number of rows must be even."""
    return [
        [
            [list(pair) for pair in zip(*lines, strict=True)]
            for lines in zip(picture[::2].tolist(), picture[1::2].tolist(), strict=True)
        ]
        for picture in pictures
    ]


def _highlighted(pieces: list[dict[str, Any]], *, marks: tuple[str, str] | None) -> Text:
    """Target tokens are styled or, if `marks` is given, enclosed in these two strings."""
    from rich.text import Text

    text, document = Text("  "), 0
    for piece in pieces:
        if piece["document"] != document:
            document = piece["document"]
            text.append("\n  -- next document --\n  ")
        shown = escape(piece["text"]).replace("\\n", "\\n\n  ")
        if not piece["learned"]:
            text.append(shown)
        elif marks is None:
            text.append(shown, style=LEARNED_STYLE)
        else:
            text.append(marks[0] + shown + marks[1])
    return text


def in_half_blocks(picture: NDArray[np.uint8]) -> Text:
    """Draw uint8[rows, columns, 3] with half blocks, two pixels each: the upper in the foreground colour, the lower in
    the background's. The number of rows must be even."""
    from rich.text import Text

    text = Text()
    for upper, lower in zip(picture[::2].tolist(), picture[1::2].tolist(), strict=True):
        text.append("  ")
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", style=f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})")
        text.append("\n")
    return text


def in_letters(picture: NDArray[np.uint8]) -> Text:
    """Draw uint8[rows, columns, 3] without colours: each character is two pixels, one above the other, by mean
    brightness, or X on the outline of a box. The number of rows must be even."""
    from rich.text import Text

    from engine.data.images import BOX_COLOUR

    outlined = (picture == BOX_COLOUR).all(-1).reshape(len(picture) // 2, 2, -1).any(1)
    bright = picture.mean(-1).reshape(len(picture) // 2, 2, -1).mean(1)
    places = (bright * len(BRIGHTNESS) / 256).astype(int)
    lines = ["".join("X" if box else BRIGHTNESS[place] for place, box in zip(*pair, strict=True))
             for pair in zip(places.tolist(), outlined.tolist(), strict=True)]  # fmt: skip
    return Text("".join(f"  {line}\n" for line in lines))


def escape(text: str) -> str:
    """Control, format and unassigned characters are escaped, so that none reaches a terminal."""
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if unicodedata.category(letter).startswith("C") else letter
        for letter in text
    )


def _marks(console: Console) -> tuple[str, str]:
    return ("⟦", "⟧") if _unicode(console) else ("[[", "]]")


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
