"""The Launch screen's state: the present choice, what it comes to, how it came to be, and what is known of every file.

Reads profile and recipe files and draws nothing: the screen changes it and shows it. What a choice means is
`tui.launch.choice`.

Try: `python -m pytest tests/tui/screens/test_launch.py`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.budget.advise.fit import Advice, Suggestion, advise
from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.queue import Queue
from engine.launch.create_run import create_run
from engine.spec.files.find import SpecKind
from engine.spec.files.rewrite import kind_of_table
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.run import RunSpec
from tui.files import user_files
from tui.files.catalog import Entry, Machine, entry_of, profile_entries, recipe_entries
from tui.launch.choice import Choice, Outcome, Trouble, from_settings, refusal, split_of, work_out
from tui.launch.fields import NAME, Row, as_typed, rows_of

QUEUE_WAIT_SECONDS = 24 * 3600.0
"""How long a queued run waits for a busy device; as `tunedeck queue add` has it."""


class Bench:
    """The present choice and all that follows from it. `work` must be called after every change; all changes do."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.choice = Choice("", "")
        self.outcome = Outcome()
        self.sound = Outcome()
        """The last outcome that had a spec: what is shown while something does not add up."""
        self.profiles: list[Entry] = []
        self.recipes: list[Entry] = []
        self.verdicts: dict[str, Outcome] = {}
        """What each recipe comes to on the chosen profile, as far as it is known."""
        self._history: list[Choice] = []
        self._advice: tuple[Choice, Advice] | None = None
        self._files = ("", "")
        self._plain: tuple[Choice, dict[str, str]] | None = None

    def begin(self, settings: object = None) -> None:
        """Read the files anew, and take over `settings` where there are any."""
        self._list()
        first = self.choice if self.choice.profile else self._first()
        if settings is not None:
            self.remember()
        self.choice = from_settings(settings, first)
        self.work()

    def _first(self) -> Choice:
        """Where nothing was chosen yet: this machine, and the first recipe that could be started on it."""
        choices = [Choice(self.profiles[0].text, recipe.text) for recipe in self.recipes]
        return next((choice for choice in choices if refusal(work_out(choice), "start") is None), choices[0])

    def _list(self) -> None:
        self.profiles, self.recipes = profile_entries(self._machine), recipe_entries()
        self.verdicts.clear()
        self._plain = None

    def work(self) -> None:
        """Work out the choice, in about a millisecond."""
        if self.choice.profile not in [entry.text for entry in self.profiles]:
            self.profiles.append(entry_of("profile", self.choice.profile, self._machine))
        if self.choice.recipe not in [entry.text for entry in self.recipes]:
            self.recipes.append(entry_of("recipe", self.choice.recipe, self._machine))
        files = (self.choice.profile, self.choice.recipe)
        self.outcome = self._worked_out()
        if files[0] != self._files[0]:
            self.verdicts.clear()
        if self.outcome.spec is not None or files != self._files:
            # Figures of another recipe, however muted, would be taken for this one's.
            self.sound = self.outcome
        self._files = files

    def _worked_out(self) -> Outcome:
        """A profile that is not this machine's may be planned for, not started."""
        outcome, entry = work_out(self.choice), self.profiles[self.places[0]]
        if outcome.spec is None or not entry.trouble:
            return outcome
        return replace(outcome, troubles=(Trouble("", entry.trouble), *outcome.troubles))

    @property
    def places(self) -> tuple[int, int]:
        """Where the chosen profile and recipe are in their lists."""
        profiles, recipes = [entry.text for entry in self.profiles], [entry.text for entry in self.recipes]
        return profiles.index(self.choice.profile), recipes.index(self.choice.recipe)

    def rows(self) -> list[Row]:
        """The fields as they stand; the micro-batch says how the batch is cut."""
        troubled = [trouble.row for trouble in self.outcome.troubles if trouble.row]
        rows = rows_of(self.sound.spec, self.choice.overrides, self.choice.options, working_directory(), troubled)
        if self.outcome.plan is None or self.outcome.spec is None:
            return rows
        split = split_of(self.outcome.spec, self.outcome.plan).short
        return [row._replace(beside=split) if row.key == "train.micro_batch" else row for row in rows]

    # What is worked out while nobody types.

    def advice(self, *, work: bool = False) -> Advice | None:
        """Advice for the present choice; None until it was worked out, and where there is no plan."""
        if work and self.outcome.plan is not None and self.outcome.spec is not None and self.advice() is None:
            self._advice = (self.choice, advise(self.outcome.spec))
        return self._advice[1] if self._advice is not None and self._advice[0] == self.choice else None

    def next_verdict(self) -> bool:
        """Work out one more recipe's verdict; False when all are known."""
        entry = next((entry for entry in self.recipes if entry.text not in self.verdicts), None)
        if entry is not None:
            self.verdicts[entry.text] = work_out(Choice(self.choice.profile, entry.text))
        return entry is not None

    # Changes.

    def remember(self) -> None:
        """What `undo` returns to."""
        if self.choice.profile and (not self._history or self._history[-1] != self.choice):
            self._history.append(self.choice)

    @property
    def can_undo(self) -> bool:
        """Whether there is anything to return to."""
        return bool(self._history)

    def undo(self) -> None:
        """Take the last change back."""
        self.choice = self._history.pop()
        self.work()

    def change(self, choice: Choice) -> None:
        """Go on with another choice."""
        if choice != self.choice:
            self.remember()
            self.choice = choice
            self.work()

    def type(self, key: str, text: str) -> None:
        """A text as it is typed: a row that says what its file says is no change."""
        plain = self.choice.without(key)
        self.choice = plain if key != NAME and self._in_file(plain, key) == text else plain.put(key, text)
        self.work()

    def _in_file(self, plain: Choice, key: str) -> str | None:
        """What a row says without its override; kept, for it is asked at every letter typed there."""
        if self._plain is None or self._plain[0] != plain:
            spec = work_out(plain).spec
            rows = rows_of(spec, plain.overrides, plain.options, working_directory()) if spec is not None else []
            self._plain = (plain, {row.key: row.value for row in rows})
        return self._plain[1].get(key)

    def apply(self, suggestion: Suggestion) -> str:
        """Apply a fix; returns what was changed."""
        choice = self.choice
        for key, (_, after) in suggestion.changes.items():
            choice = choice.put(key, as_typed(after))
        self.change(choice)
        return ", ".join(f"{key} = {as_typed(after)}" for key, (_, after) in suggestion.changes.items())

    # Doing something with it. The files are read again: they may have changed since the last key.

    def make_run(self, runs_dir: Path, *, force: bool = False) -> tuple[RunDirectory, list[str]]:
        """A run directory that an engine can be started on, with notices. Raises TunedeckError."""
        return create_run(self._spec_now(), runs_dir, force=force)

    def enqueue_run(self, runs_dir: Path) -> tuple[str, int]:
        """Put the run at the end of the queue; its name and its place. Raises TunedeckError."""
        spec = self._spec_now()
        limits = spec.limits.model_copy(update={"wait_seconds": QUEUE_WAIT_SECONDS})
        directory, _ = create_run(spec.model_copy(update={"limits": limits}), runs_dir)
        return directory.name, Queue(runs_dir).add(directory).waiting.index(directory.name) + 1

    def _spec_now(self) -> RunSpec:
        spec = work_out(self.choice).spec
        if spec is None:
            raise UsageError("a profile or recipe file has changed meanwhile", fix="look at the fields")
        return spec

    @property
    def unsaved(self) -> list[SpecKind]:
        """The kinds of file that were changed."""
        kinds: set[SpecKind] = {kind_of_table(key.partition(".")[0]) for key in self.choice.overrides}
        return sorted(kinds, reverse=True)

    def name_for(self, kind: SpecKind) -> str:
        """A free name for the changed file."""
        entry = self.profiles[self.places[0]] if kind == "profile" else self.recipes[self.places[1]]
        return user_files.free_name(kind, entry.path.stem)

    def save(self, kind: SpecKind, name: str) -> Path:
        """Write the changed file under a new name and go on with it. Raises UsageError or SpecError."""
        source = self.choice.profile if kind == "profile" else self.choice.recipe
        path = user_files.save_as(kind, source, self.choice.sets, name)
        overrides = self.choice.overrides.items()
        kept = {key: text for key, text in overrides if kind_of_table(key.partition(".")[0]) != kind}
        self.remember()
        self.choice = replace(self.choice, overrides=kept, **{kind: path.stem})
        self._list()
        self.work()
        return path
