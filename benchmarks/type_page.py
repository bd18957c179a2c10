"""Writes docs/model-types.md from the results of `benchmarks.model_types`. Nothing is measured here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model-types.md"
PLAN_RIGHT = 0.02
"""Largest relative difference between the predicted and the measured peak of a plan that counts as right."""
PLANS = ("plan, LoRA", "plan, full")
NO_CONFIG = ("no tiny config", "no tiny model")
"""Beginnings of what is said of a type whose tiny model could not be made: it says nothing of the engine."""

Cells = Mapping[str, Mapping[str, Any]]
"""The results of a type by column; see `benchmarks.type_cell.Cell`."""
Results = Mapping[str, tuple[Sequence[str], Cells]]
"""By type, what transformers opens it as ("text", "images"), and its results."""

HEAD = """# Model types

This page answers which model types of transformers are trained, as far as each was tried, and why others are refused.

Written by `python -m benchmarks.model_types`, with transformers {transformers}, peft {peft} and torch {torch}, on a CPU
and the simulated device.

- It has all {every} model types that this transformers opens as a causal language model, or as one of images and text.
- The command finds types and sizes by asking transformers, so it tries those of a newer version, too.
- Types that need the package timm or scipy were tried with it installed. Without it they are refused, with the command
  that installs it.

| | types |
|---|---|
| trained with LoRA and in full: all cells that were measured are right (a plan within {right:.0%}) | {good} |
| of these, plans and resume were measured of | {measured} |
| trained, with a cell that failed or a plan that is off ([below](#what-fails)) | {partly} |
| refused before a run folder exists, with the reason ([below](#refused)) | {refused} |
| refused or failed later ([below](#what-fails)) | {late} |
| no tiny model could be made of the class ([below](#not-tried)) | {untried} |
| not tried yet: the command goes on with them ([below](#not-tried)) | {waiting} |

Types that are not tried are no other case for the engine: it asks the model as loaded, not a list of names.

## Trained

Each is a tiny model with random weights, a vocabulary of 50,000 and two to four layers, in the class that its hub
folder would name, trained in fp32 on text. LoRA on all linear layers recomputes activations, full fine-tuning keeps
them.

- **plan**: the predicted peak of the steps beside that of a run; *s*: the plan is a simulation that `plan` makes
  unasked ([memory.md](memory.md)), else the closed form of the family.
- **packing**: two packed documents against each alone, and the first exchanged. *apart*: the second does not move.
  *refused*: packing is refused, all else is trained.
- **resume**: after one step, the adapter is equal bit for bit to that of a run without interruption.
- **cut**: the loss of a padded micro-batch beside those of its rows alone, relative.
- **adapter, full, merged**: largest difference between the engine's logits and those of the adapter opened by peft, of
  the fully tuned model, and of the adapter merged with `tunedeck merge`, opened by transformers in the base's class
  with every tensor of the base; as a share of the largest logit. *refused*: adapters on layers that share a weight are
  not merged, as `merge` and the run's first lines say.
"""

TABLE = """
### {title}

| type | plan, LoRA | plan, full | packing | resume | cut | adapter | full | merged |
|---|---|---|---|---|---|---|---|---|
"""


def write_page(document: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write docs/model-types.md from the document that `benchmarks.model_types` saves."""
    every, versions = document["every"], document["versions"]
    results: Results = {name: (ways, document["types"].get(name, {})) for name, ways in every.items()}
    names = ("good", "partly", "late", "refused", "untried", "waiting")
    groups: dict[str, dict[str, Cells]] = {name: {} for name in names}
    for name, (_, cells) in results.items():
        groups[group_of(cells)][name] = cells
    counts = {name: len(types) for name, types in groups.items()}
    counts["measured"] = sum(all(name in cells for name in (*PLANS, "resume")) for cells in groups["good"].values())
    text = HEAD.format(every=len(results), right=PLAN_RIGHT, **versions, **counts)
    trained = groups["good"] | groups["partly"]
    for title, way in {"Images and text": True, "Text": False}.items():
        rows = {name: trained[name] for name in sorted(trained) if ("images" in results[name][0]) is way}
        text += TABLE.format(title=title)
        text += "".join(f"| {' | '.join(_row(name, cells))} |\n" for name, cells in rows.items())
    failures = groups["partly"] | groups["late"]
    text += "\n## What fails\n\n| type | cell | what is said |\n|---|---|---|\n"
    text += "".join(
        f"| {name} | {cell} | {said} |\n" for name in sorted(failures) for cell, said in _failures(failures[name])
    )
    text += "\n## Refused\n\n`recipes check`, `plan` and `train` say the same.\n\n| what is said | types |\n|---|---|\n"
    text += _by_reason((name, refusal_of(cells)) for name, cells in groups["refused"].items())
    text += "\n## Not tried\n\n| why there is no tiny model | types |\n|---|---|\n"
    text += _by_reason((name, str(cells["gate"]["failed"])) for name, cells in groups["untried"].items())
    if groups["waiting"]:
        text += f"\nNot tried yet: {', '.join(sorted(groups['waiting']))}.\n"
    page.write_text(text, encoding="utf-8")


def group_of(cells: Cells) -> str:
    """Where a type belongs: "good", "partly" (trained, but a cell is wrong), "late" (not trained, found after a run
    folder existed), "refused" (before; with one method, or always), "untried", or "waiting"."""
    if not cells:
        return "waiting"
    gate = cells.get("gate", {})
    methods = [cells.get(method, {}) for method in ("lora", "full")]
    if "refused" in gate or (any("refused" in each for each in methods) and any("losses" in each for each in methods)):
        return "refused"
    if str(gate.get("failed", "")).startswith(NO_CONFIG):
        return "untried"
    if any("losses" not in cells.get(method, {}) for method in ("lora", "full")):
        return "late"
    return "partly" if _failures(cells) else "good"


def refusal_of(cells: Cells) -> str:
    """What is said of a type that is refused."""
    return str(next(cells[name]["refused"] for name in ("gate", "lora", "full") if "refused" in cells[name]))


def _failures(cells: Cells) -> list[tuple[str, str]]:
    """(cell, sentence) of everything that is wrong."""
    found = [(name, _escaped(cell["failed"])) for name, cell in cells.items() if "failed" in cell]
    for name in PLANS:
        error = cells.get(name, {}).get("peak_error", 0.0)
        if abs(error) > PLAN_RIGHT:
            found.append((name, f"the predicted peak is off by {100 * error:+.1f} %"))
    return found


def _row(name: str, cells: Cells) -> list[str]:
    packing = cells.get("packing", {})
    return [
        name,
        *(_plan(cells.get(plan, {})) for plan in PLANS),
        "apart" if packing.get("apart") else "refused" if "refused" in packing else _other(packing),
        "equal" if cells.get("resume", {}).get("equal") else _other(cells.get("resume", {})),
        _difference(cells.get("split", {}), "loss_difference"),
        *(_difference(cells.get(result, {}), "logit_difference") for result in ("lora", "full", "merged")),
    ]


def _plan(cell: Mapping[str, Any]) -> str:
    if "peak_error" not in cell:
        return _other(cell)
    text = f"{100 * cell['peak_error']:+.1f} %" + (" *s*" if cell["by"] == "simulated" else "")
    return text if abs(cell["peak_error"]) <= PLAN_RIGHT else f"**{text}**"


def _other(cell: Mapping[str, Any]) -> str:
    return "**failed**" if "failed" in cell else "refused" if "refused" in cell else "not yet"


def _difference(cell: Mapping[str, Any], key: str) -> str:
    value = cell.get(key)
    return _other(cell) if value is None else f"{value:.0e}" if value else "equal"


def _by_reason(said: Iterable[tuple[str, str]]) -> str:
    """A row for each reason, with the types of which it is said; the name of a type is taken out of the sentence."""
    reasons: dict[str, list[str]] = {}
    for name, sentence in said:
        plain = re.sub(rf" ?\({re.escape(name)}\)|'{re.escape(name)}' ", "", sentence)
        reasons.setdefault(_escaped(plain), []).append(name)
    return "".join(f"| {reason} | {', '.join(sorted(types))} |\n" for reason, types in sorted(reasons.items()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
