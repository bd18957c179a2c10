"""Finds and downloads the JSON and CSV files of hub data sets, which are then read row by row like local ones.

What the hub said of a data set is noted in the cache folder, so that it opens without a connection later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download

from engine.config.files.caches import data_set_note
from engine.config.files.data_files import LOADERS, suffix_of
from engine.config.schema.data import Source
from engine.data.store import make_cache_folder

PLAIN_SETTINGS: dict[str, Sequence[Any]] = {
    "field": (None,), "names": (None,), "column_names": (None,), "header": ("infer", 0), "index_col": (None, False),
    "usecols": (None,), "skiprows": (None, 0), "nrows": (None,), "skipfooter": (0,), "comment": (None,),
    "quotechar": ('"',), "quoting": (0,), "doublequote": (True,), "escapechar": (None,), "dialect": (None,),
    "skipinitialspace": (False,), "lineterminator": (None, "\n"), "on_bad_lines": ("error",),
    "encoding": (None, "utf-8", "utf8", "UTF-8", "utf-8-sig"),
}  # fmt: skip
"""Settings of a README for JSON and CSV files that change the rows, with the values that the reader of rows takes."""


@dataclass(frozen=True)
class HubFiles:
    """The files of one configuration of a hub data set."""

    commit: str
    splits: dict[str, list[str]]
    """The names in the repository, by split."""
    separator: str | None
    """The separator of CSV files, if the README names one."""
    features: dict[str, Any] | None
    """Types of the columns, as the README has them."""


def find_hub_files(source: Source, builder: Any) -> HubFiles | None:
    """Return the files that a builder of `datasets` has for a hub data set; None if they are not JSON or CSV, or have a
    layout that only the library reads."""
    if builder.name not in ("json", "csv") or settings_not_read(builder.config):
        return None
    root = f"hf://datasets/{source.hub}@"
    splits = {str(split): list(map(str, urls)) for split, urls in (builder.config.data_files or {}).items()}
    urls = [url for each in splits.values() for url in each]
    kinds = {LOADERS.get(suffix_of(Path(url))) for url in urls}
    if kinds != {builder.name} or not all(url.startswith(root) for url in urls):
        return None
    (commit,) = {url.removeprefix(root).partition("/")[0] for url in urls}
    names = {split: [url.removeprefix(f"{root}{commit}/") for url in each] for split, each in splits.items()}
    separator = getattr(builder.config, "sep", ",")
    features = builder.config.features or builder.info.features
    found = HubFiles(commit, names, separator if separator != "," else None, features.to_dict() if features else None)
    note = data_set_note(source.hub or "", source.config)
    make_cache_folder(note.parent)
    note.write_text(json.dumps(asdict(found)))
    return found


def noted_hub_files(source: Source) -> HubFiles | None:
    """Return what was found when there was a connection; None if nothing was."""
    try:
        return HubFiles(**json.loads(data_set_note(source.hub or "", source.config).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def download(source: Source, found: HubFiles, split: str) -> list[Path]:
    """Return the files of a split on this machine; the library's cache has those that were downloaded before. Raises
    what `hf_hub_download` does."""
    return [
        Path(
            hf_hub_download(
                source.hub or "", name, repo_type="dataset", revision=found.commit,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
        for name in found.splits[split]
    ]  # fmt: skip


def settings_not_read(config: Any) -> list[str]:
    """Return the settings by which a README has JSON or CSV files read in another way than they are read here."""
    return [
        name for name, values in PLAIN_SETTINGS.items() if hasattr(config, name) and getattr(config, name) not in values
    ]
