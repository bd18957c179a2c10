"""What is fuzzed: one function for each kind of file by a stranger. Each takes one input and asserts what is promised.

An error of `engine.errors` is an answer; any other exception is a defect. No text that is shown may have a control or
direction character, and nothing may be run or written outside the folder of the target (`tests.fuzz.guard`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.cli.small_recipes import PROFILE, RECIPE
from tests.fuzz import console, data, runs, shared_files
from tests.fuzz.inputs import json_files, spliced, values


@dataclass(frozen=True)
class Target:
    """One kind of input: how it is made, and what must hold for it."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any, Path], None]
    """Called with an input and a folder of its own, which outlives it."""
    share: float = 1.0
    """Of the inputs of the command; a check that opens libraries gets fewer."""


TARGETS = (
    Target("recipe and profile", st.one_of(runs.toml_texts(RECIPE), runs.toml_texts(PROFILE)), runs.recipe_text),
    Target("recipe that is imported", spliced(RECIPE.encode()), runs.import_recipe),
    Target("file of a run", runs.run_files, runs.run_file),
    Target("events", runs.event_files, runs.events),
    Target("panes of the console", st.tuples(console.journals, console.logs), console.panes, share=0.3),
    Target("control request", runs.control_files, runs.control),
    Target("manifest", runs.manifests, runs.manifest),
    Target("queue", json_files(runs.QUEUED), runs.queue),
    Target("reference to a run", runs.references, runs.reference),
    Target("data row", data.rows, data.row),
    Target("lines of a data file", data.lines, data.screened_lines),
    Target("nesting", st.tuples(values, st.lists(st.integers(0, 400), max_size=5)), data.nesting),
    Target("data file and archive", data.data_files, data.data_file, share=0.05),
    Target("image", data.pictures, data.picture),
    Target("chat template", data.templates, data.template, share=0.3),
    Target("model folder, adapter", data.model_files, data.model_folder),
    Target("exported run", shared_files.archives(), shared_files.archive),
    Target("configuration of another tool", shared_files.yaml_files, shared_files.other_tool, share=0.5),
    Target("task file", shared_files.task_files, shared_files.task_file, share=0.3),
    Target("glob", shared_files.globs, shared_files.glob),
    Target("chat", shared_files.chats, shared_files.chat),
)
