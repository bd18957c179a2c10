"""How many of other tools' example configurations `tunedeck recipes import` takes without a blank, and plans.

Give a folder with one folder for each tool: `python -m benchmarks.imported_recipes FOLDER --each 20`. Of each tool's
files that ask for a training, as many as --each says are taken at equal distances in the order of their paths; without
it all. For docs/recipes.md these were, of the repositories' commits (`git archive COMMIT FOLDERS | tar -x -C TOOL`),

    axolotl        axolotl-ai-cloud/axolotl 067b021c: examples
    llamafactory   hiyouga/LLaMA-Factory ff6d4d12: examples, data
    torchtune      pytorch/torchtune bd2a0fc7: recipes/configs
    trl            huggingface/trl f2cd5771: examples; huggingface/alignment-handbook 925acdf: recipes

A file counts if nothing is left to fill in, `recipes check` finds no problem and a plan is made. A model whose config
is not on this machine is planned as the stand-in, --model, which the table says. Nothing is simulated: a model whose
step has to be, and was not, is "unplanned".
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.budget.advise.gate import problems_of_run
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import make_plan
from engine.budget.advise.staged_plan import find_run_facts
from engine.config.imports.convert import draft_of, name_for, recipe_text
from engine.config.imports.tools import RECOGNISED
from engine.config.load import resolve
from engine.errors import SpecError, TunedeckError

STAND_IN = "Qwen/Qwen2.5-7B-Instruct"


@dataclass(frozen=True)
class Outcome:
    file: Path
    how: str
    """imported, stand-in (imported, and planned as the stand-in), blank, refused, unplanned, or "no training"."""
    why: str = ""


def outcome_of(file: Path, folder: Path, profile: str, model: str) -> Outcome:
    try:
        draft = draft_of(file)
    except SpecError as error:
        why = error.problems[0]
        return Outcome(file, "no training" if RECOGNISED in why or "no training" in why else "refused", why)
    if draft.blanks:
        return Outcome(file, "blank", "; ".join(f"{key}: {why}" for key, why in draft.blanks.items()))
    target = folder / f"{name_for(file)}.toml"
    target.write_text(recipe_text(draft, file.name), "utf-8")
    try:
        if problems := problems_of_run(resolve(profile, str(target)).spec):
            return Outcome(file, "unplanned", problems[0])
        _plan(profile, target, [])
        return Outcome(file, "imported")
    except TunedeckError as error:
        if "on this machine" not in str(error):
            return Outcome(file, "unplanned", error.render())
    # The names of modules and a revision belong to the model that is not here.
    overrides = [f"model.id={model}", "model.revision=", "model.adapter=", "model.quantize=none"]
    overrides += ['method.targets="all-linear"', "method.also_train=[]", "method.exclude=[]", "model.chat_template="]
    try:
        _plan(profile, target, overrides)
    except TunedeckError as error:
        return Outcome(file, "unplanned", error.render())
    return Outcome(file, "stand-in")


def _plan(profile: str, recipe: Path, overrides: Sequence[str]) -> None:
    spec = resolve(profile, str(recipe), overrides).spec
    facts = find_run_facts(spec)
    spec = settle_parallel(spec, facts).spec
    make_plan(spec, facts=facts.of(spec.recipe.model))


def sample(found: Sequence[Outcome], count: int | None) -> list[Outcome]:
    """`count` outcomes at equal distances of those that ask for a training; all of them without `count`."""
    asked = [one for one in found if one.how != "no training"]
    if count is None or len(asked) <= count:
        return asked
    return [asked[index * len(asked) // count] for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=None)
    parser.add_argument("--profile", default="80gb")
    parser.add_argument("--model", default=STAND_IN)
    given = parser.parse_args()
    sums: Counter[str] = Counter()
    for tool in sorted(path for path in given.folder.iterdir() if path.is_dir()):
        files = sorted([*tool.rglob("*.yml"), *tool.rglob("*.yaml")])
        with tempfile.TemporaryDirectory() as folder:
            found = [outcome_of(file, Path(folder), given.profile, given.model) for file in files]
        chosen = sample(found, given.each)
        counts = Counter(one.how for one in chosen)
        sums += counts
        print(f"{tool.name}: {_imported(counts)} of {len(chosen)}  {dict(counts)}")
        for one in chosen:
            if one.how not in ("imported", "stand-in"):
                print(f"  {one.how}: {one.file.relative_to(tool)}: {one.why.replace(str(given.folder), '')[:200]}")
    print(f"all: {_imported(sums)} of {sums.total()}")


def _imported(counts: Counter[str]) -> int:
    return counts["imported"] + counts["stand-in"]


if __name__ == "__main__":
    main()
