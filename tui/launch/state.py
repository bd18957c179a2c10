"""The Launch screen's state: the choice, its evaluation, earlier choices for undo, and the profile and recipe files.

The screen calls the methods that change the choice; each ends in `_evaluate`. The widgets are given one
`LaunchSnapshot`. Nothing here draws. `tui.launch.evaluate` says what a choice means.

Try: `python -m pytest tests/tui/screens/test_launch.py`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.advise.preflight import free_bytes
from engine.config.files.find import SpecKind
from engine.config.files.machine import working_directory
from engine.config.files.text import visible
from engine.config.files.write import kind_of_table
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError
from tui.files import user_files
from tui.files.catalog import (
    FileEntry,
    Machine,
    find_entry,
    profile_entries,
    recipe_entries,
    write_detected_profile,
)
from tui.launch.choice import Choice, choice_from_settings
from tui.launch.evaluate import EvaluatedChoice, FieldProblem, evaluate_choice
from tui.launch.fields import PROFILE, RECIPE, FieldRow, field_rows, format_value
from tui.launch.lengths import basis_words, change_words, is_small, unread_record
from tui.launch.needs import Needs, find_pace, time_words
from tui.launch.snapshot import LaunchSnapshot
from tui.theme import VERDICTS

if TYPE_CHECKING:
    from engine.budget.advise.search import Advice, Suggestion

DEMO = "demo"
"""The name of the shipped profile and of the shipped recipe that run on any machine."""


class LaunchState:
    """The present choice, its evaluation, and the earlier choices for undo."""

    def __init__(self, machine: Machine, runs_dir: Path | None = None) -> None:
        """`runs_dir` is the folder whose earlier runs tell how long a step takes; None: nothing is known about it."""
        self.runs_dir = runs_dir
        self._time: tuple[RunSpec, str] | None = None
        self._machine = machine
        self.choice = Choice("", "")
        self.evaluated = EvaluatedChoice()
        self._last_valid = EvaluatedChoice()
        self.profiles: list[FileEntry] = []
        self.recipes: list[FileEntry] = []
        self.verdicts: dict[str, EvaluatedChoice] = {}
        self._history: list[Choice] = []
        self._before_pick: tuple[Choice, int] | None = None
        """The choice when a list of files was opened, and the number of earlier choices then."""
        self._reading: Path | None = None
        """The record of the data that are being read."""
        self._unreadable: set[Path] = set()
        """Records of data that could not be read."""
        self._advice: tuple[Choice, Advice] | None = None
        self._missing: RunSpec | None = None
        """The run spec whose advice needs simulations that have not been made; None if there is none."""
        self._unadvised: Choice | None = None
        """The choice for which there is no advice, because a simulation failed."""
        self._evaluated_files = ("", "")
        """Profile and recipe of the latest evaluation."""
        self._file_values: tuple[Choice, dict[str, str]] | None = None
        """A choice, and the value that each of its fields has without an override."""
        self._unchanged: tuple[Choice, dict[str, str]] | None = None
        """Profile and recipe, and the value that each field has in their files."""
        self._unwritten: str | None = None
        """Why the profile of this machine cannot be written, empty if it was; None until it is chosen."""

    def snapshot(self) -> LaunchSnapshot:
        """Collect the values that the widgets have to show now."""
        return LaunchSnapshot(
            self.choice, self.evaluated, self._last_valid, self.field_rows(), self.profiles, self.recipes,
            self.verdicts, Needs(self._last_valid.disk_bytes, self._free_bytes(), self.time()), self._basis(),
        )  # fmt: skip

    def begin(self, settings: object = None) -> None:
        """Read the profile and recipe files again. If `settings` (a dict of profile, recipe and overrides) are given,
        they become the choice; otherwise the present choice is kept, or at first a default is made."""
        self._read_files()
        self._advice = None  # a run that has ended meanwhile may have taught the pace
        if settings is not None:
            self.remember()
        default = self.choice if self.choice.profile else self._first_choice(settings)
        self.choice = choice_from_settings(settings, default)
        self._evaluate()

    def _first_choice(self, settings: object) -> Choice:
        """The initial choice: the first recipe of the project or the user, else the demo, on the profile of this
        machine. Without a GPU, the demo runs on its simulated device, unless the user has a profile."""
        machine = self.profiles[0]
        given = settings.get("recipe") if isinstance(settings, Mapping) else None
        own = next((entry.argument for entry in self.recipes if entry.origin != "shipped" and not entry.broken), None)
        recipe = str(given or own or DEMO)
        simulated = recipe == DEMO and self._machine.device.kind != "cuda" and machine.origin == "detected"
        return Choice(DEMO if simulated else machine.argument, recipe)

    def _read_files(self) -> None:
        self.profiles, self.recipes = profile_entries(self._machine), recipe_entries()
        self.verdicts.clear()
        self._file_values = self._unchanged = None
        self._unwritten = None

    def _evaluate(self) -> None:
        """Evaluate the present choice and store the result in `evaluated`. Every method that changes the choice calls
        this."""
        self._missing = None
        files = (self.choice.profile, self.choice.recipe)
        if files[0] not in [entry.argument for entry in self.profiles]:
            self.profiles.append(find_entry("profile", files[0], self._machine))
        if files[1] not in [entry.argument for entry in self.recipes]:
            self.recipes.append(find_entry("recipe", files[1], self._machine))
        self.evaluated = self._evaluate_on_this_machine()
        if files[0] != self._evaluated_files[0]:
            self.verdicts.clear()
        if self.evaluated.spec is not None or files != self._evaluated_files:
            # After a change of files the old plan must not be shown, even muted: it belongs to another recipe.
            self._last_valid = self.evaluated
        self._evaluated_files = files

    def _evaluate_on_this_machine(self) -> EvaluatedChoice:
        """Evaluate the choice. If the profile does not match this machine, there is a plan, and also a problem that
        prevents a start."""
        profile = self.profiles[self.positions[0]]
        if profile.origin == "detected" and self._unwritten is None:
            self._unwritten = write_detected_profile(self._machine)
        if profile.origin == "detected" and self._unwritten:
            return EvaluatedChoice(problems=(FieldProblem("", f"the profile of this machine: {self._unwritten}"),))
        evaluated = evaluate_choice(self.choice)
        if evaluated.spec is None or not profile.problem:
            return evaluated
        return replace(evaluated, problems=(FieldProblem("", profile.problem), *evaluated.problems))

    @property
    def positions(self) -> tuple[int, int]:
        """The index of the chosen profile in `profiles`, and of the chosen recipe in `recipes`. Raises ValueError if
        one is not listed."""
        profiles, recipes = [entry.argument for entry in self.profiles], [entry.argument for entry in self.recipes]
        return profiles.index(self.choice.profile), recipes.index(self.choice.recipe)

    def field_rows(self) -> list[FieldRow]:
        """All fields with their values; the note of the micro-batch field shows how the batch is divided."""
        with_problems = [problem.row for problem in self.evaluated.problems if problem.row]
        choice, split = self.choice, self.evaluated.batch_split
        rows = field_rows(
            self._last_valid.spec, choice.overrides, choice.options, working_directory(), with_problems,
            self._stage_notes(),
        )  # fmt: skip
        before = self._values_of_files() if any(row.changed for row in rows) else {}
        files = [self._file_row(PROFILE), self._file_row(RECIPE)]
        return files + [_with_notes(row, before, split.formula if split is not None else "") for row in rows]

    def _file_row(self, kind: str) -> FieldRow:
        """The row of the chosen profile or recipe: its name, and its title or what is wrong with it."""
        entries = self.profiles if kind == PROFILE else self.recipes
        argument = self.choice.profile if kind == PROFILE else self.choice.recipe
        entry = next(entry for entry in entries if entry.argument == argument)
        style = "$bad" if entry.broken else "$caution" if entry.problem else "$muted"
        return FieldRow(kind, kind, visible(entry.path.stem), visible(entry.problem or entry.title), False, style)

    def _values_of_files(self) -> dict[str, str]:
        """The value of each field in the files of profile and recipe; empty if these cannot be read. The result is
        stored, because it is needed at every letter typed into a field."""
        files = Choice(self.choice.profile, self.choice.recipe)
        if self._unchanged is None or self._unchanged[0] != files:
            spec = evaluate_choice(files).spec
            rows = field_rows(spec, {}, {}, working_directory()) if spec is not None else []
            self._unchanged = (files, {row.key: row.value for row in rows})
        return self._unchanged[1]

    def _stage_notes(self) -> dict[str, tuple[str, str]]:
        """Return {name of stage: (verdict in words, its style)}; the style is muted while the present choice has no run
        spec."""
        valid = self.evaluated.spec is not None
        return {
            stage.name: (
                f"{VERDICTS[stage.verdict].glyph if stage.verdict else '·'} {stage.text}",
                VERDICTS[stage.verdict].style if stage.verdict and valid else "$muted",
            )
            for stage in self._last_valid.stages
        }

    def toggle_stage(self, row: FieldRow) -> None:
        """Switch the stage of a row off if it is enabled, else on; the former choice is stored for `undo`."""
        self.remember()
        self.set_field(row.key, "false" if row.value == "true" else "true")

    # Slower evaluations, made while the user does not type.

    def _basis(self) -> str:
        plan = self._last_valid.plan
        if plan is None:
            return ""
        record = unread_record(self.evaluated)
        reading = record is not None and record == self._reading
        return basis_words(plan, reading=reading, readable=record is not None and record not in self._unreadable)

    def unread_data(self) -> Choice | None:
        """The present choice if its data are to be read unasked; `data_were_read` is to be called afterwards. None
        while data are being read."""
        record, spec = unread_record(self.evaluated), self.evaluated.spec
        if record is None or spec is None or self._reading is not None or record in self._unreadable:
            return None
        if not is_small(spec.recipe):
            return None
        self._reading = record
        return self.choice

    def data_were_read(self, *, failed: bool = False) -> str:
        """Evaluate the choice again after data were read, or could not be; returns what has changed, empty if nothing
        has."""
        if failed and self._reading is not None:
            self._unreadable.add(self._reading)
        self._reading, before = None, self.evaluated.plan
        self.verdicts.pop(self.choice.recipe, None)
        self._advice = None
        self._evaluate()
        return change_words(before, self.evaluated.plan)

    def advice(self, *, compute: bool = False) -> Advice | None:
        """Return the advice of `fit` for the present choice; None if it is unknown. With `compute`, the advice is
        computed now if there is a plan, unless a simulation has to be made first; without, only advice computed earlier
        is returned."""
        evaluated = self.evaluated
        planned = evaluated.planned if evaluated.plan is not None else None
        waits = self._missing is not None or self._unadvised == self.choice
        if compute and not waits and planned is not None and self.advice() is None:
            try:
                self._advice = (self.choice, _advise(planned))
            except NotSimulatedError:
                self._missing = planned
        return self._advice[1] if self._advice is not None and self._advice[0] == self.choice else None

    def time(self, *, compute: bool = False) -> str:
        """How long the run takes, in words; empty if that is unknown yet. With `compute`, earlier runs are read now,
        unless they were read for this choice before."""
        spec = self.evaluated.spec
        if spec is None or self.runs_dir is None:
            return ""
        if compute and (self._time is None or self._time[0] is not spec):
            plan = self.evaluated.plan
            predicted = plan.time if isinstance(plan, Plan) else None
            self._time = (spec, time_words(spec, find_pace(spec, self.runs_dir), predicted))
        return self._time[1] if self._time is not None and self._time[0] is spec else ""

    def _free_bytes(self) -> int | None:
        """Free bytes of the disk on which runs are kept; None if unknown."""
        return free_bytes(self.runs_dir) if self.runs_dir is not None else None

    @property
    def simulation(self) -> Callable[[], object] | None:
        """A function that makes and stores the simulations that the choice's plan or fixes need; None if none is
        missing. To be called in another thread than the screen's, by `engine.launch.other_processes.with_simulations`;
        afterwards `simulated` evaluates the choice again."""
        to_simulate, missing = self.evaluated.to_simulate, self._missing
        if to_simulate is not None:
            return partial(make_plan, to_simulate)
        return None if missing is None else partial(_advise, missing)

    def simulated(self, problem: str) -> None:
        """Evaluate the choice again after a simulation; `problem` says why it failed, empty if it did not."""
        if problem and self._missing is not None:
            self._unadvised = self.choice
        self._evaluate()
        if problem and self.evaluated.to_simulate is not None:
            self.evaluated = replace(self.evaluated, to_simulate=None, unplanned=problem)

    def compute_next_verdict(self) -> bool:
        """Evaluate one more recipe on the chosen profile; returns False if all recipes have been evaluated."""
        entry = next((entry for entry in self.recipes if entry.argument not in self.verdicts), None)
        if entry is not None:
            self.verdicts[entry.argument] = evaluate_choice(Choice(self.choice.profile, entry.argument))
        return entry is not None

    # Changes of the choice.

    def begin_pick(self) -> None:
        """To be called when a list of files is opened, in which each move of the cursor changes the choice."""
        self._before_pick = (self.choice, len(self._history))

    def end_pick(self, *, keep: bool) -> None:
        """Keep the file under the cursor as one change that `undo` takes back, or return to the choice before."""
        if self._before_pick is None:
            return
        (before, count), self._before_pick = self._before_pick, None
        del self._history[count:]
        if keep and self.choice != before:
            self._history.append(before)
        elif self.choice != before:
            self.choice = before
            self._evaluate()

    def remember(self) -> None:
        """Store the present choice for `undo`."""
        if self.choice.profile and (not self._history or self._history[-1] != self.choice):
            self._history.append(self.choice)

    @property
    def can_undo(self) -> bool:
        """Whether an earlier choice is stored, so that `undo` has an effect."""
        return bool(self._history)

    def undo(self) -> None:
        """Return to the choice before the last change."""
        self.choice = self._history.pop()
        self._evaluate()

    def change(self, choice: Choice) -> None:
        """Make `choice` the present choice and evaluate it; the former one is stored for `undo`. Does nothing if they
        are equal."""
        if choice != self.choice:
            self.remember()
            self.choice = choice
            self._evaluate()

    def set_field(self, key: str, text: str) -> None:
        """Set the field with the key `key` to `text`; called at every letter typed. A text equal to the value in the
        file makes no override."""
        without = self.choice.without_field(key)
        in_file = key not in self.choice.options and self._file_value(without, key) == text
        self.choice = without if in_file else without.with_field(key, text)
        self._evaluate()

    def _file_value(self, without: Choice, key: str) -> str | None:
        """Return the value that the field `key` has in the files; None if it has no row. `without` is the choice
        without an override for the field. The result is stored, because it is needed at every letter typed into the
        field."""
        if self._file_values is None or self._file_values[0] != without:
            spec = evaluate_choice(without).spec
            rows = field_rows(spec, without.overrides, without.options, working_directory()) if spec is not None else []
            self._file_values = (without, {row.key: row.value for row in rows})
        return self._file_values[1].get(key)

    def apply(self, suggestion: Suggestion) -> str:
        """Make the changes of a suggested fix to the choice; returns a text that lists the changes."""
        changes = {key: format_value(after) for key, (_, after) in suggestion.changes.items()}
        choice = self.choice
        for key, text in changes.items():
            choice = choice.with_field(key, text)
        self.change(choice)
        return ", ".join(f"{key} = {text}" for key, text in changes.items())

    # Files made from the choice.

    @property
    def changed_kinds(self) -> list[SpecKind]:
        """Which of the two files the overrides change: the recipe, the profile, both or none."""
        kinds: set[SpecKind] = {kind_of_table(key.partition(".")[0]) for key in self.choice.overrides}
        return sorted(kinds, reverse=True)

    def unused_name(self, kind: SpecKind) -> str:
        """A free name under which the changed profile or recipe can be saved."""
        entry = self.profiles[self.positions[0]] if kind == "profile" else self.recipes[self.positions[1]]
        return user_files.unused_name(kind, entry.path.stem)

    def save(self, kind: SpecKind, name: str) -> Path:
        """Save the changed profile or recipe under a new name, and choose the new file. Raises UsageError or
        SpecError."""
        source = self.choice.profile if kind == "profile" else self.choice.recipe
        path = user_files.save_as(kind, source, self.choice.set_arguments, name)
        overrides = self.choice.overrides.items()
        kept = {key: text for key, text in overrides if kind_of_table(key.partition(".")[0]) != kind}
        self.remember()
        self.choice = replace(self.choice, overrides=kept, **{kind: path.stem})
        self._read_files()
        self._evaluate()
        return path


def _with_notes(row: FieldRow, before: Mapping[str, str], formula: str) -> FieldRow:
    """A row with the value of its file, if it was changed, and for the micro-batch how the batch is divided."""
    was = f"was {before[row.key] or 'not set'}" if row.changed and not row.is_stage and row.key in before else ""
    notes = [formula if row.key == "train.micro_batch" else "", was or row.note]
    return row._replace(note="  ".join(note for note in notes if note))


def _advise(spec: RunSpec) -> Advice:
    """The advice of `fit` for a run spec. Raises NotSimulatedError if it needs a simulation that was not made."""
    from engine.budget.advise.search import advise  # slow to import: not before the first paint

    return advise(spec)
