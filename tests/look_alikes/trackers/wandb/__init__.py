"""Looks like wandb 0.31 with WANDB_MODE=offline: a folder for each process, with one line of `wandb.jsonl` for each
call. Only the first line is written at once, the others by `finish`. Fails as without an API key if WANDB_LOOK_ALIKE is
"no key"."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """wandb's own error."""


class Settings:
    """Settings of a run."""

    def __init__(self, *, console: str) -> None:
        self.console = console


class Run:
    """A run that takes each step once, in order."""

    resumed = False
    step = 0

    def __init__(self, folder: Path) -> None:
        (folder / "files").mkdir(parents=True)
        self.dir = str(folder / "files")
        self._file = (folder / "wandb.jsonl").open("w")
        self._lines: list[str] = []
        self._last = -1

    def write(self, **fields: Any) -> None:
        self._lines.append(json.dumps(fields))
        if len(self._lines) == 1:
            self._file.write(self._lines[0] + "\n")
            self._file.flush()

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.write(metric=name, over=step_metric)

    def log(self, data: dict[str, Any], *, step: int) -> None:
        assert step > self._last, "wandb drops this"
        self._last = step
        self.write(step=step, data=data)

    def finish(self, *, exit_code: int) -> None:
        self.write(finish=exit_code)
        self._file.writelines(line + "\n" for line in self._lines[1:])
        self._file.close()


def init(
    *, project: str, name: str, id: str, group: str | None, tags: list[str], config: dict[str, Any], dir: str,
    resume: str, settings: Settings,
) -> Run:  # fmt: skip
    """Begin a run, or continue the one with this id."""
    if os.environ.get("WANDB_LOOK_ALIKE") == "no key":
        raise UsageError("No API key configured. Use `wandb login` to log in.")
    assert resume == "allow" and settings.console == "off"
    number = len(list(Path(dir).glob("wandb/offline-run-*")))
    run = Run(Path(dir, "wandb", f"offline-run-{number:03d}-{id}"))
    run.write(init=name, id=id, project=project, group=group, tags=tags, recipe=config["name"])
    return run
