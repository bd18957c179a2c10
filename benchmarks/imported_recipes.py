"""How many of other tools' example configurations `tunedeck recipes import` takes without a blank, and plans.

Give a folder with one folder for each tool: `python -m benchmarks.imported_recipes FOLDER --each 20`. Of each tool's
files that ask for a training, as many as --each says are taken at equal distances in the order of their paths; without
it all. For docs/recipes.md these were, of the repositories' commits (`git archive COMMIT FOLDERS | tar -x -C TOOL`),

    axolotl        axolotl-ai-cloud/axolotl 067b021c: examples
    llamafactory   hiyouga/LLaMA-Factory ff6d4d12: examples, data
    torchtune      pytorch/torchtune bd2a0fc7: recipes/configs
    trl            huggingface/trl f2cd5771: examples; huggingface/alignment-handbook 925acdf: recipes

    swift          modelscope/ms-swift 3602360a: examples (YAML and shell scripts)
    nemo           NVIDIA-NeMo/Automodel 36044ad3: examples

A file counts if nothing is left to fill in, `recipes check` finds no problem and a plan is made. A model whose config
is not on this machine is checked and planned as a tiny model of its class (CLASSES, by its name), so with its own names
of modules. Where its class is not known the file is "unknown model". Nothing is simulated: a model whose step has to
be, and was not, is "unplanned".
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.type_configs import tiny_config
from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import make_plan
from engine.budget.advise.staged_plan import find_run_facts
from engine.checks.run import problems_of_run
from engine.config.load import resolve
from engine.errors import SpecError, TunedeckError
from engine.extras.imports.convert import draft_of, name_for, recipe_text
from engine.extras.imports.import_names import keep_matching_names
from engine.extras.imports.tools import RECOGNISED

NONE = (RECOGNISED, "no training", "no command line of a training")
ENDINGS = (".yml", ".yaml", ".sh")

CLASSES = (
    ("llama-4", "llama4"),
    ("llama-3.2-(11|90)b-vision", "mllama"),
    ("qwen3.5.*-a[0-9]+b|qwen3.6.*-a[0-9]+b", "qwen3_5_moe"),
    ("qwen3.[56]", "qwen3_5"),
    ("qwen3-next", "qwen3_next"),
    ("qwen3-vl.*-a[0-9]+b", "qwen3_vl_moe"),
    ("qwen3-vl", "qwen3_vl"),
    ("qwen3-(omni)", ""),
    ("qwen3.*-a[0-9]+b", "qwen3_moe"),
    ("qwen3", "qwen3"),
    ("qwen2.5-vl", "qwen2_5_vl"),
    ("qwen2-vl", "qwen2_vl"),
    ("qwen1.5-moe", "qwen2_moe"),
    ("qwen-7b", ""),
    ("qwen|deepcoder|cogito.*qwen", "qwen2"),
    ("gemma-4", "gemma4"),
    ("gemma-3n", "gemma3n"),
    ("gemma-3-(270m|1b)", "gemma3_text"),
    ("gemma-3", "gemma3"),
    ("gemma-2-", "gemma2"),
    ("gemma", "gemma"),
    ("mixtral", "mixtral"),
    ("pixtral|mistral-small-3.1|magistral-small-2509", "mistral3"),
    ("ministral-3", "mistral3"),
    ("voxtral", "voxtral"),
    ("mistral|ministral|magistral|devstral", "mistral"),
    ("phi-4|phi-3|phi3", "phi3"),
    ("phi-1|phi-2", "phi"),
    ("gpt-oss", "gpt_oss"),
    ("glm-4.[67]-flash|glm-4.7", "glm4_moe_lite"),
    ("glm-4.6v", "glm4v"),
    ("glm-4.5", "glm4_moe"),
    ("glm-4-32b", "glm4"),
    ("glm-5", "glm_moe_dsa"),
    ("falcon-h1", "falcon_h1"),
    ("falcon", "falcon"),
    ("nemotron-3|nvidia-nemotron-3", "nemotron_h"),
    ("nemotron-mini", "nemotron"),
    ("deepseek-v2", "deepseek_v2"),
    ("deepseek-v3", "deepseek_v3"),
    ("jamba", "jamba"),
    ("granite-4", "granitemoehybrid"),
    ("granite", "granite"),
    ("lfm2-vl", "lfm2_vl"),
    ("lfm2-8b-a1b", "lfm2_moe"),
    ("lfm2", "lfm2"),
    ("smolvlm", "smolvlm"),
    ("pythia|redpajama", "gpt_neox"),
    ("gpt-j", "gptj"),
    ("cerebras-gpt", "gpt2"),
    ("starcoder2", "starcoder2"),
    ("stablelm", "stablelm"),
    ("apertus", "apertus"),
    ("olmo-3", "olmo3"),
    ("seed-oss", "seed_oss"),
    ("internvl", "internvl"),
    ("c4ai-command-r7b", "cohere2"),
    ("mpt", "mpt"),
    ("llava-1.5", "llava"),
    ("hunyuan", "hunyuan_v1_dense"),
    ("minimax-m2", "minimax_m2"),
    ("afm-4.5", "arcee"),
    ("llama|yi-34b|orpheus|smollm2|mimo-7b", "llama"),
)
"""Expressions for names of models, in lower case, to the type that transformers gives their config; "" has none."""


@dataclass(frozen=True)
class Outcome:
    file: Path
    how: str
    """imported, "by its class" (planned as a tiny model of its class), blank, refused, unplanned, "unknown model" or
    "no training"."""
    why: str = ""


def outcome_of(file: Path, folder: Path, profile: str) -> Outcome:
    try:
        draft = draft_of(file)
    except SpecError as error:
        why = error.problems[0]
        return Outcome(file, "no training" if any(word in why for word in NONE) else "refused", why)
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
    kind = class_of(resolve(profile, str(target)).spec.recipe.model.id)
    if not kind:
        return Outcome(file, "unknown model", draft.recipe["model"]["id"])
    made = write_tiny(kind, folder / "models" / kind)
    draft = draft_of(file)
    draft.recipe["model"] |= {"id": str(made)}
    keep_matching_names(draft)
    target.write_text(recipe_text(draft, file.name), "utf-8")
    overrides = ["model.revision=", "model.adapter=", "model.tokenizer=builtin:bytes"]
    try:
        if problems := problems_of_run(resolve(profile, str(target), overrides).spec):
            return Outcome(file, "unplanned", problems[0])
        _plan(profile, target, overrides)
    except TunedeckError as error:
        return Outcome(file, "unplanned", error.render())
    return Outcome(file, "by its class")


def _plan(profile: str, recipe: Path, overrides: Sequence[str]) -> None:
    spec = resolve(profile, str(recipe), overrides).spec
    facts = find_run_facts(spec)
    spec = settle_parallel(spec, facts).spec
    make_plan(spec, facts=facts.of(spec.recipe.model))


def class_of(model: str) -> str:
    """Return the type that transformers gives a model's config, by its name; "" where it is not known."""
    return next((kind for words, kind in CLASSES if re.search(words, model.lower())), "")


def write_tiny(kind: str, folder: Path) -> Path:
    """Write the config of a tiny model of a type, without weights."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True)
        config = tiny_config(kind).to_dict()
        for part in (config, config.get("text_config") or {}):
            part["max_position_embeddings"] = 1 << 20  # long enough for every file
        (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


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
    given = parser.parse_args()
    sums: Counter[str] = Counter()
    for tool in sorted(path for path in given.folder.iterdir() if path.is_dir()):
        files = sorted(file for ending in ENDINGS for file in tool.rglob(f"*{ending}"))
        with tempfile.TemporaryDirectory() as folder:
            found = [outcome_of(file, Path(folder), given.profile) for file in files]
        chosen = sample(found, given.each)
        counts = Counter(one.how for one in chosen)
        sums += counts
        print(f"{tool.name}: {_imported(counts)} of {len(chosen)}  {dict(counts)}")
        for one in chosen:
            if one.how not in ("imported", "by its class"):
                print(f"  {one.how}: {one.file.relative_to(tool)}: {one.why.replace(str(given.folder), '')[:200]}")
    print(f"all: {_imported(sums)} of {sums.total()}")


def _imported(counts: Counter[str]) -> int:
    return counts["imported"] + counts["by its class"]


if __name__ == "__main__":
    main()
