"""Hashes that say what was scored: the samples, their tokens, and the weights.

Try: `pytest tests/evaluate/test_scoring.py`
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from engine.data.cache import hash_text
from engine.data.tokens import TokenData
from engine.journal.checkpoints_on_disk import MANIFEST
from engine.model.reference import find_starting_weights
from engine.spec.schema.run import RunSpec


def data_fingerprint(data: TokenData) -> str:
    """A hash of the samples: which rows of which sources they are, and their images. It does not depend on the
    tokenizer."""
    columns, documents = data.columns, data.documents
    rows = np.stack([columns.sources[documents].astype(np.int64), columns.origins[documents]])
    return hash_text(*data.source_fingerprints, rows.tobytes().hex(), _image_digests(data))


def tokens_hash(data: TokenData) -> str:
    """A hash of the tokens of all samples, of where their answers are, and of their images."""
    columns, documents = data.columns, data.documents
    pieces = [columns.ids[columns.offsets[document] : columns.offsets[document + 1]] for document in documents]
    bounds = np.stack([columns.answer_starts[documents], columns.answer_ends[documents]])
    lengths = columns.lengths[documents]
    return hash_text(*(array.tobytes().hex() for array in (np.concatenate(pieces), bounds, lengths)),
                     _image_digests(data))  # fmt: skip


def _image_digests(data: TokenData) -> str:
    """The hashes of the samples' images, in order, as one text; empty without images."""
    found = data.columns.images
    if found is None:
        return ""
    spans = [found.digests[found.offsets[document] : found.offsets[document + 1]] for document in data.documents]
    return np.concatenate(spans).tobytes().hex()


def weights_identity(spec: RunSpec, folder: Path | None) -> str:
    """A hash of the weights in `folder`, or, if that is None, of the model that the run starts from. Files without a
    manifest are recognised by name, size and time of change."""
    start = find_starting_weights(spec.recipe.model)
    adapter = Path(start.adapter) if start.adapter else None
    parts = [spec.recipe.model.model_dump_json(), str(spec.recipe.train.seed), _of_files(start.folder)]
    return hash_text(*parts, _of_files(adapter), _of_files(folder))


def _of_files(folder: Path | None) -> str:
    """A hash that identifies the files in `folder`: from the checkpoint's manifest for its weights, else from name,
    size and time of change of each file. Empty without a folder."""
    if folder is None or not folder.is_dir():
        return ""
    manifest = folder.parent / MANIFEST
    if folder.name == "weights" and manifest.is_file():
        files = json.loads(manifest.read_text("utf-8"))["files"]
        return hash_text(json.dumps({name: facts for name, facts in files.items() if name.startswith("weights/")}))
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in found]
    return hash_text(json.dumps(facts))
