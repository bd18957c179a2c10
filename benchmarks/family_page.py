"""Writes docs/families.md from the results of `benchmarks.families`. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.family_configs import DENSE, MIXTURES, RECURRENT, TRAINED
from benchmarks.family_configs import REFUSED as REFUSED_CONFIGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
GROUPS = {"Dense": DENSE, "Mixtures of experts": MIXTURES, "With recurrent layers": RECURRENT}
NAMES = {"lora": "LoRA", "full": "full"}
PLANS = {"closed_form": "closed form", "simulated": "simulated"}

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Results by family and method; see `benchmarks.families.Cell`."""

HEAD = """# Model families

This page answers which model families were planned, trained and opened again, and which are refused;
[models.md](models.md) has the models by name.

Written by `python -m benchmarks.families`, with transformers {transformers}, peft {peft} and torch {torch}, on a CPU
and the simulated device.

{trained} families are planned and trained, with LoRA on all linear layers and in full; {refused} are refused.

- Each is a tiny model with random weights in fp32 and the dropout of its family's config, trained for three steps of
  eight sequences. LoRA recomputes activations, full fine-tuning keeps them.
- Families that are not listed are no other case for the engine: it accepts any causal language model of transformers,
  and refuses it in a sentence if its logits are not computed as expected.

The columns:

- **plan**: by the closed form of the family, or from a simulation that `plan` makes unasked ([memory.md](memory.md)).
- **peak**: the predicted peak of the steps beside the measured one. The models are so small that rounding of tensors
  to blocks of memory counts.
- **capped**: how often memory ran out when the device had three quarters of that peak, where the micro-batch of eight
  sequences does not fit, and the remedies that the run took.
- **losses**: the largest relative difference between the losses of the capped run and those of the run with enough
  memory; at most 1e-5.
- **result**: the largest difference between the logits of the engine's model and those of its result, as a share of
  the largest logit; at most 1e-4. A model is opened by transformers. An adapter is opened by peft beside its base, and
  merged with `tunedeck merge` by transformers alone.
"""

TABLE = """
## {title}

| family | training | plan | peak | loss, steps 1 to 3 | capped | losses | result |
|---|---|---|---|---|---|---|---|
"""

UNTRIED = """
## Not tried yet

`benchmarks/family_configs.py` has these, too, and the command above goes on with them: {names}.
"""

REFUSED = """
## Refused

`recipes check`, `plan` and `train` refuse these with the same sentence, before weights are downloaded; `internlm2`,
which stands for models that come with their own code, is refused before a run exists, unless the command allows that
code.

| family | what is said |
|---|---|
"""


def write_page(results: Results, page: Path = PAGE) -> None:
    """Write docs/families.md from the results: figures for the families that were trained, a sentence for those that
    failed or are refused."""
    refused = {name: cells for name, cells in results.items() if all("refused" in cell for cell in cells.values())}
    trained = {name: cells for name, cells in results.items() if name not in refused}
    versions = {name: version(name).partition("+")[0] for name in ("transformers", "peft", "torch")}
    text = HEAD.format(trained=len(trained), refused=len(refused), **versions)
    for title, group in GROUPS.items():
        text += TABLE.format(title=title)
        rows = (row for name, cells in trained.items() if name in group for row in _rows(name, cells))
        text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text += REFUSED
    text += "".join(f"| {name} | {_sentence(cells)} |\n" for name, cells in refused.items())
    untried = [name for name in (*TRAINED, *REFUSED_CONFIGS) if name not in results]
    if untried:
        text += UNTRIED.format(names=", ".join(f"`{name}`" for name in untried))
    page.write_text(text, encoding="utf-8")


def _rows(name: str, cells: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for method, cell in cells.items():
        problem = cell.get("failed") or cell.get("refused")
        yield [name, NAMES[method], *([_escaped(problem), *["none"] * 5] if problem else _figures(cell))]


def _figures(cell: Mapping[str, Any]) -> list[str]:
    remedies = cell["remedies"]
    times = "once" if len(remedies) == 1 else f"{len(remedies)} times"
    return [
        PLANS[cell["plan"]],
        f"{100 * cell['peak_error']:+.1f} %",
        ", ".join(f"{loss:.3f}" for loss in cell["losses"]),
        f"{times}: {', '.join(dict.fromkeys(remedies))}",
        _difference(cell["loss_difference"]),
        _difference(cell["logit_difference"]),
    ]


def _difference(value: float) -> str:
    return f"{value:.0e}" if value else "equal"


def _sentence(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sentences with which a family is refused, joined by "; ": one sentence if all its methods have the
    same."""
    said = dict.fromkeys(_escaped(cell["refused"]) for cell in cells.values())
    return "; ".join(said)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
