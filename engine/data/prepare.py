"""Prepares a run's token data for training and validation: opens the sources, finds or builds the cached tokens, splits
off the validation data, packs rows and reports."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from engine.config.files.caches import SequenceBounds, cache_folder, lengths_record, record_longest
from engine.config.schema.data import PREFERENCE_FORMATS, UNPAIRED_FORMATS, Source
from engine.config.schema.run import DATA_VERSION, RunSpec
from engine.data.bounds import LINE_TOO_LONG, TOO_DEEP, TOO_MANY_CHARACTERS, UNPACKS_TOO_FAR
from engine.data.chat_template import REFUSAL, unused_variables
from engine.data.conversations import LEFT_OUT, PYTHON_LIST, TOOL_CALL, TurnNames, texts_in
from engine.data.csv_files import BROKEN_QUOTES, TOO_MANY_FIELDS
from engine.data.end_tokens import model_ends
from engine.data.formats import Format
from engine.data.images import ImageProcessor, ImageReader, ImageSource, image_notice, stamps_of_images
from engine.data.json_rows import KEY_TWICE, NO_CHARACTER, NOT_AN_OBJECT, fix_of_single_row
from engine.data.order import hold_out, pack
from engine.data.overlap import Overlap, find_overlap
from engine.data.preferences import add_mismatched, balance_notice, other_objective, preference_notice
from engine.data.recognise import PROMPT_COLUMNS, Judged, check_turn_names_of_row, judged_by, recognise
from engine.data.records import ROW_TOO_LARGE, SourceRows
from engine.data.report import WARNING, DataReport, describe, drop_lines
from engine.data.second_reader import compare_rows
from engine.data.sources import open_rows
from engine.data.store import StoreWriter, cached_store, hash_text
from engine.data.tokenise import CUT_AWAY, TOO_LONG, Tokeniser
from engine.data.tokens import Columns, TokenData
from engine.data.workers import COLUMN_DTYPES, ROWS_PER_REASON, Piece, SourceCount, rendering_version, tokenise_rows
from engine.errors import DataError
from engine.journal.event_text import format_duration

CHAT_VERSION = "chat 6"
"""Part of the cache entry of rendered conversations. Increase it when the rendering changes, and add what it changed to
`rendering_version`, which is part of the fingerprint."""

PAIRS_VERSION = "pairs 1"
"""Part of the fingerprint where prompts and completions are conversations. Increase it when their rendering changes."""

BOUNDS_VERSION = "bounds 1"
"""Part of the fingerprint where a line or row is beyond the bounds. Increase it when they change."""

BOUND_REASONS = (LINE_TOO_LONG, TOO_DEEP, UNPACKS_TOO_FAR, ROW_TOO_LARGE, TOO_MANY_CHARACTERS, NOT_AN_OBJECT, KEY_TWICE,
                 NO_CHARACTER, TOO_MANY_FIELDS, BROKEN_QUOTES)  # fmt: skip

COUNTS_VERSION = "counts 4"
"""Part of the cache entry. Increase it when other counts are kept next to the tokens."""

STORE_VERSION = "1"
"""Part of every fingerprint. Increase it when tokenising or the layout of the cached files changes."""

FIRST_VERSION_NOTICE = (
    "the run was started by an older version and keeps that version's format of the data: prompts and "
    "completions without the chat template, text files line by line"
)

TABLES = {"train": "data.sources", "validation": "data.validation", "evaluation": "evaluate.sources"}
"""Where the sources of a part are in the recipe."""

PROGRESS_SECONDS = 5.0

LOOKED_AT = 20
"""Rows of which columns are looked at that are not read."""

ENDLESS = (
    "WARNING: source {name}: {number:,} answers do not end with an end token, so the model does not learn to "
    "stop: the chat template writes none, and the model's generation_config.json does not list the next turn's "
    "marker"
)
"""What is said of answers that another turn follows."""

Notify = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True)
class PreparedData:
    train: TokenData
    validation: TokenData | None
    report: DataReport
    fingerprint: str
    """Hash of samples, tokens, split, packing and weights. Equal fingerprints mean equal steps."""
    overlaps: list[Overlap]
    """What the held-out parts have in common with the training data."""
    shown: Sequence[DuplicateRows] = ()
    """The pairs of `overlaps`, if they were requested."""

    @property
    def bounds(self) -> SequenceBounds:
        """As `known_bounds` finds them afterwards."""
        judged = self.train.in_pairs or self.train.mismatched is not None
        targets = _most_targets(self.train, self.validation) if judged else None
        return SequenceBounds(int(self.train.lengths.max()), targets)


@dataclass(frozen=True)
class _Opened:
    """A source whose rows are open and whose format is recognised."""

    source: Source
    rows: SourceRows
    format: Format


class _Tokenised(NamedTuple):
    columns: Columns
    counts: list[SourceCount]
    sources: list[Source]
    fingerprints: list[str]
    """Hashes of everything that decides what these sources train."""
    contents: list[str]
    """A hash of each source's rows and format. It depends neither on the source's name nor on the tokenizer."""
    images: ImageReader | None
    """None if there are no images."""
    notices: list[str]
    """What is said of the sources besides their counts."""
    rows: list[SourceRows]
    """The rows of each source."""
    judged: Judged
    """pairs: documents 2·p and 2·p + 1 are the chosen and the rejected sequence of a pair; unpaired: each document is
    desirable or not."""


def prepare_data(
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None = None,
    *,
    notify: Notify = lambda text: None,
    for_report: bool = False,
) -> PreparedData:
    """Token data of a run, from the cache if they are there. `for_report`: also compare the sources of evaluation with
    the training data, and find the duplicates' files and lines. Whether the model's attention keeps packed documents
    apart is checked by `engine.model.config.check_packing`.

    Raises DataError: data missing, unreadable, or with nothing to learn; EnvironmentProblem: hub unreachable, or cache
    not writable.
    """
    data, seed = spec.recipe.data, spec.recipe.train.seed
    # Before the files are read, so that a later change of them is noticed.
    lengths, own_lengths = lengths_record(spec.recipe), lengths_record(spec.recipe, validation=True)
    tokeniser = Tokeniser(tokenizer, data, images, version=spec.data_version)
    sources = [source for source in data.sources if source.enabled]
    if not sources:
        raise DataError("every source is disabled", fix="set enabled = true for one in [[data.sources]]")
    found = _prepare_sources(spec, sources, tokeniser, "train", notify)
    fingerprints = found.fingerprints
    keys = [int(hash_text("split", str(seed), source.name)[:16], 16) for source in sources]
    train_documents, held_out = hold_out(found.columns.origins, found.columns.sources, keys, data.valid_fraction)
    packed_length, mixed = data.max_length if data.packing else None, data.mixing == "probability"
    train = _view(found, train_documents, packed_length, by_source=mixed)
    add_mismatched(train, spec.recipe, in_steps=True)
    own = [source for source in data.validation if source.enabled]
    validation, own_counts = None, []
    if own:
        held = _prepare_sources(spec, own, tokeniser, "validation", notify)
        validation = _view(held, np.arange(len(held.columns)), None)
        own_counts, fingerprints = held.counts, fingerprints + held.fingerprints
    elif data.valid_fraction:
        validation = _view(found, held_out, None)
    notices = [FIRST_VERSION_NOTICE] if spec.data_version == 1 else []
    notices += [f"{WARNING}{sentence}" for sentence in unused_variables(tokenizer, data.template_args)]
    notices += found.notices + [notice for notice in [balance_notice(train, spec.recipe)] if notice]
    compared, key = [_Compared("train", train, found.rows)], [*fingerprints, repr(data.valid_fraction), str(seed)]
    if validation is not None:
        add_mismatched(validation, spec.recipe, in_steps=False)
        compared.append(_Compared("validation", validation, (held if own else found).rows))
    if for_report:
        compared, key = _with_evaluation(spec, compared, key, tokeniser, notify)
    overlaps = find_overlap([(each.name, each.data) for each in compared], key) if len(compared) > 1 else []
    reasons = {reason for count in found.counts for reason in count.dropped}
    longest = int(train.lengths.max())
    cut = longest == data.max_length or any(reason.startswith(TOO_LONG) for reason in reasons)
    lines = [overlap.line() for overlap in overlaps]
    warnings = [*(notice for notice in notices if notice.startswith(WARNING)), *lines]
    record_longest(
        lengths, longest, _most_images(train, images), targets=_most_targets(train, None if own else validation),
        keeps_all=not cut and not data.packing, warnings=warnings,
    )  # fmt: skip
    if own and validation is not None:
        record_longest(own_lengths, int(validation.lengths.max()), targets=_most_targets(validation))
    parts = [describe("train", train)] + ([describe("validation", validation)] if validation else [])
    report = DataReport(found.counts, own_counts, parts, notices, lines)
    fingerprint, shown = _fingerprint(spec, sources, fingerprints), _located(overlaps, compared) if for_report else []
    return PreparedData(train, validation, report, fingerprint, overlaps, shown)


def _with_evaluation(
    spec: RunSpec, compared: list[_Compared], key: list[str], tokeniser: Tokeniser, notify: Notify
) -> tuple[list[_Compared], list[str]]:
    """Add the sources of evaluation to what is compared, and to the key of the result."""
    sources = [source for source in spec.recipe.evaluate.sources if source.enabled]
    if not sources:
        return compared, key
    found = _prepare_sources(spec, sources, tokeniser, "evaluation", notify)
    part = _Compared("evaluation", _view(found, np.arange(len(found.columns)), None), found.rows)
    return [*compared, part], [*key, "evaluation", *found.fingerprints]


class _Compared(NamedTuple):
    """A part of the data that is compared with others, and the rows of its sources."""

    name: str
    data: TokenData
    rows: list[SourceRows]


class DuplicateRow(NamedTuple):
    """One row of a pair of duplicates."""

    part: str
    source: str
    place: str
    """FILE:LINE, or the number of the row."""
    ids: list[int]
    """Its first document's tokens."""


class DuplicateRows(NamedTuple):
    """A held-out row, and the row of another part that equals it or is like it."""

    held_out: DuplicateRow
    other: DuplicateRow
    similarity: float
    """1 for equal rows."""


def _located(overlaps: Sequence[Overlap], compared: Sequence[_Compared]) -> list[DuplicateRows]:
    """The pairs of all overlaps, with file and line."""
    parts = {each.name: each for each in compared}
    found = []
    for overlap in overlaps:
        left = _rows_of(parts[overlap.part], [pair.document for pair in overlap.pairs])
        right = _rows_of(parts[overlap.other], [pair.other for pair in overlap.pairs])
        pairs = zip(left, right, overlap.pairs, strict=True)
        found += [DuplicateRows(held_out, other, pair.similarity) for held_out, other, pair in pairs]
    return found


def _rows_of(part: _Compared, documents: Sequence[int]) -> list[DuplicateRow]:
    columns = part.data.columns
    origins: dict[int, list[int]] = {}
    for document in documents:
        origins.setdefault(int(columns.sources[document]), []).append(int(columns.origins[document]))
    places = {(source, origin): place
              for source, rows in origins.items()
              for origin, place in zip(rows, part.rows[source].places(rows), strict=True)}  # fmt: skip
    made = []
    for document in documents:
        source, origin = int(columns.sources[document]), int(columns.origins[document])
        ids = columns.ids[int(columns.offsets[document]) : int(columns.offsets[document + 1])].tolist()
        made.append(DuplicateRow(part.name, part.data.source_names[source], places[source, origin], ids))
    return made


def _most_targets(*parts: TokenData | None) -> int:
    """Target tokens of the sequence that has most."""
    return max(int(part.target_counts.max(initial=0)) for part in parts if part is not None)


def _most_images(data: TokenData, images: ImageProcessor | None) -> list[tuple[int, int]]:
    """(height, width) in pixels of each image of the row with most tokens of images; empty if the images of this family
    are not read by the model's own processor. Rows are not packed."""
    found = data.columns.images
    if images is None or images.takes != "whole" or found is None or data.patches is None or not data.has_images:
        return []
    document = int(data.documents[data.patches.argmax()])
    span = slice(int(found.offsets[document]), int(found.offsets[document + 1]))
    return list(zip(found.heights[span].tolist(), found.widths[span].tolist(), strict=True))


def prepare_sources(
    spec: RunSpec,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None = None,
    *,
    notify: Notify = lambda text: None,
) -> TokenData:
    """Token data of other sources than a run's own, to score a model on. Raises DataError if all are switched off, else
    as `prepare_data` does."""
    enabled = [source for source in sources if source.enabled]
    if not enabled:
        raise DataError("every source is disabled", fix="set enabled = true for one in [[evaluate.sources]]")
    tokeniser = Tokeniser(tokenizer, spec.recipe.data, images, version=spec.data_version)
    found = _prepare_sources(spec, enabled, tokeniser, "evaluation", notify)
    data = _view(found, np.arange(len(found.columns)), None)
    add_mismatched(data, spec.recipe, in_steps=False)
    return data


def _prepare_sources(
    spec: RunSpec, sources: Sequence[Source], tokeniser: Tokeniser, part: str, notify: Notify
) -> _Tokenised:
    """Read cached tokens, or tokenise first. `part` is "train", "validation" or "evaluation", for messages."""
    recipe, workers = spec.recipe, spec.recipe.data.workers
    judged = judged_by(recipe)
    table = TABLES[part]
    opened = [_open(source, tokeniser, recipe.train.seed, judged, table) for source in sources]
    fingerprints = [_source_fingerprint(each, tokeniser) for each in opened]
    entry = cache_folder() / "tokens" / _store_key(opened, tokeniser, fingerprints)

    def build(writer: StoreWriter) -> None:
        for number, each in enumerate(opened):

            def pieces(first: int, each: _Opened = each) -> Iterator[Piece]:
                made = tokenise_rows(each.rows, each.format, tokeniser, workers=workers, first=first)
                return _progress(made, each, first, notify)

            compared = compare_rows(each.rows, each.source.name)
            writer.add_source(number, each.source.name, each.format.name, pieces)
            writer.counts[number].compared = compared
        _require_samples(writer.counts, opened, tokeniser, part)

    store = cached_store(entry, build, notify)
    _locate_drops(store.counts, opened)
    _count_left_out(store.counts, opened)
    for count, each in zip(store.counts, opened, strict=True):
        count.unused = each.rows.available - each.rows.count
        count.columns_read, count.columns_not_read = _columns(each)
    changed = rendering_version(store.counts)
    if any(count.chat.get("stops_at_marker") for count in store.counts):
        changed.append(f"ends {sorted(tokeniser.ends)}")
    changed += [BOUNDS_VERSION] if any(set(BOUND_REASONS) & set(count.dropped) for count in store.counts) else []
    images, reader, threads = store.columns.images, None, 0 if workers == "auto" else workers
    if images is not None and tokeniser.images is not None:
        reader = ImageReader(tokeniser.images, [ImageSource(each.rows, each.format) for each in opened], threads)
        changed.append(hash_text(images.digests.tobytes().hex()))
    parts = [*fingerprints, *tokeniser.fingerprint_parts(), *changed]
    contents = [
        hash_text(each.rows.fingerprint, str(each.rows.count), repr(each.format), repr(each.format.boxes))
        for each in opened
    ]
    notices = [notice for each in opened for notice in _notices(each, tokeniser)]
    notices += [
        ENDLESS.format(name=count.name, number=count.chat["endless"])
        for count in store.counts
        if count.chat.get("endless")
    ]
    return _Tokenised(
        store.columns,
        store.counts,
        list(sources),
        parts,
        contents,
        reader,
        notices,
        [each.rows for each in opened],
        judged,
    )


def _source_fingerprint(opened: _Opened, tokeniser: Tokeniser) -> str:
    rows, form = opened.rows, opened.format
    return hash_text(
        opened.source.name, rows.fingerprint, str(rows.count), repr(form),
        *([repr(form.boxes)] if form.boxes else []),
        *([f"split {tokeniser.overlap}"] if tokeniser.split and form.name in ("text", "tokens") else []),
        *([f"{PAIRS_VERSION} {form.pairs}"] if form.has_chat_pairs else []),
        *([repr(form.names)] if form.names != TurnNames() else []),
        *(["alpaca preamble"] if form.has_preamble else []),
    )  # fmt: skip


def _require_samples(counts: Sequence[SourceCount], opened: Sequence[_Opened], tokeniser: Tokeniser, part: str) -> None:
    """Raises DataError, with what was dropped and why, if no row of any source is left."""
    if any(count.kept for count in counts):
        return
    _locate_drops(counts, opened)
    _count_left_out(counts, opened)
    raise DataError(
        f"no samples of the {part} data are left; dropped: {', '.join(drop_lines(counts))}",
        expected="at least one sample with a target token",
        fix=_fix_of_single_row(opened[0].rows, opened[0].source) or _way_to_keep(counts, tokeniser),
    )


def _store_key(opened: Sequence[_Opened], tokeniser: Tokeniser, fingerprints: Sequence[str]) -> str:
    version = [STORE_VERSION, CHAT_VERSION] if any(each.format.renders_chat for each in opened) else [STORE_VERSION]
    version += [PAIRS_VERSION] if any(each.format.name == "prompt-completion" for each in opened) else []
    files = [stamps_of_images(each.rows, each.format) for each in opened if each.format.has_images]
    version += [BOUNDS_VERSION] if any(each.rows.left_out for each in opened) else []
    version += [f"data {tokeniser.version}"] if tokeniser.version != 3 else []
    version += [f"ends {sorted(ends)}"] if (ends := model_ends(tokeniser.tokenizer)) else []
    return hash_text(*version, COUNTS_VERSION, *COLUMN_DTYPES, *tokeniser.fingerprint_parts(), *fingerprints, *files)


def _notices(opened: _Opened, tokeniser: Tokeniser) -> list[str]:
    """What is said of a source: files left aside, preference columns, columns that an older version ignores."""
    source, columns, notices = opened.source, opened.rows.columns, list(opened.rows.notices)
    preferred = preference_notice(columns, source, opened.format.name, [*opened.format.fields.values()])
    notices += [each for each in (preferred, image_notice(opened.rows, source, opened.format.has_images)) if each]
    read, others = _columns(opened)
    unread = [name for name in others if name.strip() and name not in " ".join(notices)]
    lost = [name for name in unread if name.lower() in PROMPT_COLUMNS and _adds_text(opened, name, read)]
    notices += [
        f"{WARNING}source {source.name}: the column {name} is not used; if it is part of the prompt, set it in "
        f'the source, such as columns = {{system = "{name}"}}'
        for name in lost
    ]
    if other := [name for name in unread if name not in lost]:
        notices.append(f"source {source.name}: unused columns: {_listed(other)}")
    if tokeniser.version < DATA_VERSION and not opened.format.has_images:
        now = recognise(columns, source, has_template=tokeniser.has_template)
        if ignored := sorted(set(now.fields.values()) - set(opened.format.fields.values())):
            notices.append(
                f"source {source.name}: the run was started by an older version, which ignores {', '.join(ignored)}"
            )
    return notices


def _adds_text(opened: _Opened, column: str, read: Collection[str]) -> bool:
    """Whether a column that is not read has a value, in one of the first rows, that the columns `read` lack."""
    for number in range(min(opened.rows.count, LOOKED_AT)):
        row = opened.rows.row(number)
        value = row.get(column)
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
        if text.strip() in ("", "[]", "{}", "false"):
            continue
        if not any(text.strip() in part for name in read for part in texts_in(row.get(name))):
            return True
    return False


def _columns(opened: _Opened) -> tuple[list[str], list[str]]:
    """Return the source's columns that its format reads, and the others."""
    fields = set(opened.format.fields.values())
    used = fields | {name.partition(".")[0] for name in fields if name not in opened.rows.columns}
    columns = opened.rows.columns
    return [name for name in columns if name in used], [name for name in columns if name not in used]


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _count_left_out(counts: Sequence[SourceCount], opened: Sequence[_Opened]) -> None:
    """Count the lines that were left out before the rows were made, as rows read and dropped."""
    for count, each in zip(counts, opened, strict=True):
        for screened in each.rows.left_out:
            for reason, number in screened.dropped.items():
                count.read += number
                count.dropped[reason] = count.dropped.get(reason, 0) + number
                places = count.dropped_at.get(reason, []) + screened.places(reason)
                count.dropped_at[reason] = places[:ROWS_PER_REASON]


def _way_to_keep(counts: Sequence[SourceCount], tokeniser: Tokeniser) -> str:
    """What would keep the samples that were dropped for the most frequent reason."""
    reasons: Counter[str] = Counter()
    for count in counts:
        reasons.update(count.dropped)
    reason = reasons.most_common(1)[0][0]
    if reason.startswith(TOO_LONG):
        return "add --set data.over_length=truncate; or raise data.max_length"
    if reason == CUT_AWAY:
        return "raise data.max_length: all target tokens are beyond it"
    if reason == PYTHON_LIST:
        return "write the column as JSON, with pandas: frame[COLUMN] = frame[COLUMN].map(json.dumps)"
    if reason.startswith(REFUSAL) and tokeniser.refuses_system:
        if tokeniser.system_prompt is not None:
            return "add --set data.system_prompt=; no system turn is added then"
        return "write the system turn's text into the user's first turn, or set another model.chat_template"
    if reason == f"{LEFT_OUT} {TOOL_CALL}":
        return "set model.chat_template to one that writes tool calls, such as that of a model that was trained on them"
    return "correct these rows, or set other columns in the source"


def _locate_drops(counts: Sequence[SourceCount], opened: Sequence[_Opened]) -> None:
    """Set `dropped_at`. Only row numbers are cached, since files may be moved."""
    for count, each in zip(counts, opened, strict=True):
        count.dropped_at = {reason: each.rows.places(rows) for reason, rows in count.dropped_rows.items()}


def _open(source: Source, tokeniser: Tokeniser, seed: int, judged: Judged, table: str) -> _Opened:
    if tokeniser.version == 1 and source.unit is None:
        source = source.model_copy(update={"unit": "line"})
    try:
        rows = open_rows(source, seed=seed, skip_broken=tokeniser.skip_broken, version=tokeniser.version)
    except DataError as error:
        fix = error.fix.replace("data.sources.", f"{table}.")
        raise DataError(error.found, expected=error.expected, fix=fix) from error
    has_template, version = tokeniser.has_template, tokeniser.version
    as_chat = partial(recognise, rows.columns, source, has_template=has_template, version=version, judged=judged)
    plain = tokeniser.version == 1 and source.template == "auto"
    try:
        made = (
            replace(as_chat(), pairs="plain")
            if plain
            else as_chat(markers=tokeniser.markers, opening=tokeniser.opening)
        )
    except DataError as error:
        fix = _fix_of_single_row(rows, source) or error.fix.replace("data.sources.", f"{table}.")
        raise DataError(error.found, expected=error.expected, fix=fix) from None
    if (source.roles or source.columns) and rows.count:
        check_turn_names_of_row(made, source, rows.row(0))
    allowed = {"pairs": PREFERENCE_FORMATS, "unpaired": UNPAIRED_FORMATS}
    is_judged = made.name in (*PREFERENCE_FORMATS, *UNPAIRED_FORMATS)
    if is_judged if judged is None else made.name not in allowed[judged]:
        raise other_objective(source, rows, made.fields, judged, table)
    if "label" in made.fields:
        rows = rows.numbered(made.fields["label"])
    return _Opened(source, rows, made)


def _fix_of_single_row(rows: SourceRows, source: Source) -> str | None:
    alone = rows.count == 1 and source.path is not None and source.path.lower().endswith(".json")
    return fix_of_single_row(rows.row(0), str(source.path)) if alone else None


def _progress(pieces: Iterator[Piece], opened: _Opened, first: int, notify: Notify) -> Iterator[Piece]:
    """Yield `pieces` unchanged, with a line of rows done, rate and time left every few seconds."""
    started = shown = time.monotonic()
    done, total = first, opened.rows.count
    for piece in pieces:
        yield piece
        done += piece.count.read
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            rate = (done - first) / (now - started)
            notify(
                f"tokenising {opened.source.name}: {done:,} of {total:,} rows ({100 * done / total:.0f} %), "
                f"{rate:,.0f} rows/s, about {format_duration((total - done) / rate)} left"
            )
            shown = now


def _view(
    found: _Tokenised, documents: NDArray[np.int64], packed_length: int | None, *, by_source: bool = False
) -> TokenData:
    """Packed into rows of `packed_length` tokens unless that is None; with `by_source`, no row has documents of two
    sources."""
    columns, names = found.columns, [source.name for source in found.sources]
    source_weights = [source.weight for source in found.sources]
    if packed_length is None:
        return TokenData(
            columns, documents, source_names=names, source_weights=source_weights,
            source_fingerprints=found.contents, images=found.images,
            in_pairs=found.judged == "pairs",
        )  # fmt: skip
    kinds = columns.sources[documents] if by_source else np.array(source_weights)[columns.sources[documents]]
    rows: list[NDArray[np.int64]] = []
    for kind in np.unique(kinds):
        # Only documents of equal weight may share a row, because a weight applies to a whole row.
        group = documents[kinds == kind]
        rows += [group[row] for row in pack(columns.lengths[group], packed_length)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return TokenData(
        columns, np.concatenate(rows), row_offsets=offsets, source_names=names, source_weights=source_weights
    )


def _fingerprint(spec: RunSpec, sources: Sequence[Source], fingerprints: Sequence[str]) -> str:
    data = spec.recipe.data
    split = f"{data.valid_fraction!r} {spec.recipe.train.seed}" if data.valid_fraction else ""
    weights = repr([source.weight for source in sources]) + ("" if data.mixing == "weights" else data.mixing)
    return hash_text(STORE_VERSION, split, str(data.packing), weights, *fingerprints)
