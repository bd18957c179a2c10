"""For every key of recipes and profiles: two values, and where the difference shows. Not a test module.

A new key needs a row in `CASES`: the probe that shows the difference (`tests.config.schema_probes`), two values as
`--set` takes them, and other settings under which the key matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from engine.architecture.lookup import find_facts
from engine.budget.advise.model_rules import refuse_with_model
from engine.config.check.notes import refuse_unsupported
from engine.config.load import resolve
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile
from engine.errors import TunedeckError
from tests.config.schema_probes import (
    Probe,
    accepted,
    children,
    data,
    destinations,
    environment,
    grown,
    order,
    plan,
    points,
    positions,
    proofs,
    run,
    score,
    script,
    stages,
    tasks,
    tracked,
)


class Case(NamedTuple):
    """Two values of a key, and where the difference shows."""

    probe: Probe
    first: str
    second: str
    given: tuple[str, ...] = ()
    at: str | None = None
    """The key as `--set` names it, where that is not the schema's."""
    refused: bool = False
    """Whether the second value is refused."""


def stage(line: str, *, refused: bool = False) -> Case:
    """One stage without and with this line of TOML."""
    bare = 'name = "a", ' if not line.startswith("name") else ""
    first = '[{name = "a"}]'
    return Case(stages, first, f"[{{{bare}{line}}}]", HELD_OUT, at="stages", refused=refused)


HELD_OUT = ("data.valid_fraction=0.2",)
ANSWERS = (*HELD_OUT, "generate.max_new_tokens=6")
SAMPLED = (*ANSWERS, "generate.temperature=3.0", "generate.seed=1")
LORA, CUDA, TWO = ("method.kind=lora",), ("device.kind=cuda", "device.memory_gib=24"), ("device.count=2",)
BF16 = ("model.dtype=bfloat16",)
YARN = ("model.rope_scaling.type=yarn", "model.rope_scaling.factor=4.0")
STEPS = ("train.max_steps=4",)
PAIRED = ("method.objective=dpo", "data.sources.main.path=PAIRS", "data.sources.second.enabled=false")
BRIEF = (
    "{% for m in messages %}{{ '<user>' + m['content'] + ('<end>' if brief is defined else '<end>\n') }}{% endfor %}"
    "{% if add_generation_prompt %}<user>{% endif %}"
)
SLURM = ("device.count=2", "parallel.strategy=replicated", "nodes.count=2", "nodes.launcher=slurm")
SKYPILOT = (*SLURM[:-1], "nodes.launcher=skypilot")
TIGHT = ("device.memory_gib=0.0165", "train.micro_batch=8", "train.gradient_checkpointing=false")
LONGEST = (
    "data.sources.main.path=LONG",
    "data.max_length=400",
    "train.batch_size=1",
    "train.gradient_checkpointing=false",
    'backoff.ladder=["cut"]',
    "device.memory_gib=0.018",
)
IMAGES = (
    "model.id=VLM",
    "model.tokenizer=VLM",
    "data.max_length=256",
    "data.sources.main.path=BOXES",
    "data.sources.main.format=detection",
    'data.sources.main.columns={boxes = "objects.bbox", labels = "objects.category_name"}',
    "data.sources.main.prompt=what?",
    "data.sources.main.box_order=yxyx",
    "data.sources.main.box_scale=unit",
    "data.sources.second.enabled=false",
)
MERGED = '[{name = "a", finish = {merge = true}}]'
CHAIN = '[{name = "a"}, {name = "b", from = "a"}]'
GROUP = 'train.groups=[{match="**.mlp.**", learning_rate=1e-2}]'
PICKED = ("train.max_steps=3", "eval.every_steps=1", "checkpoint.every_steps=1", *HELD_OUT)

CASES: dict[str, Case] = {
    # recipe
    "recipe.schema": Case(accepted, "1", "2", at="schema"),
    "recipe.kind": Case(accepted, "recipe", "profile", at="kind"),
    "model.id": Case(plan, "builtin:tiny", "Qwen/Qwen2.5-0.5B"),
    "model.tokenizer": Case(data, "builtin:bytes", "./no-such-folder", refused=True),
    "model.revision": Case(plan, "", "v9", ("model.id=walk/model",)),
    "model.adapter": Case(accepted, "", "./no-such-folder", LORA),
    "model.chat_template": Case(data, "", "{% for m in messages %}{{ m.content }}{% endfor %}"),
    "model.add_tokens": Case(plan, "[]", '["<a>"]', LORA),
    "model.special_tokens": Case(data, "{}", '{eos = "<end>"}', ("data.sources.main.template=none",)),
    "model.dtype": Case(plan, "float32", "bfloat16"),
    "model.attention": Case(plan, "sdpa", "eager"),
    "model.attention_dropout": Case(plan, "off", "keep", ("model.id=DROPS",), refused=True),
    "model.kernels": Case(plan, "auto", "torch", (*LORA, *CUDA, "train.gradient_checkpointing=false")),
    "model.quantize": Case(plan, "none", "nf4", (*LORA, *CUDA)),
    "model.rope_scaling.type": Case(positions, "yarn", "linear", ("model.rope_scaling.factor=4.0",)),
    "model.rope_scaling.factor": Case(
        accepted, "4.0", "1.5", ("model.rope_scaling.type=linear", "data.max_length=8192"), refused=True
    ),
    "model.rope_scaling.original_max_position_embeddings": Case(positions, "1024", "2048", YARN),
    "model.init": Case(run, "random", "pretrained", ("model.id=MODEL",)),
    "method.kind": Case(plan, "lora", "full"),
    "method.objective": Case(accepted, "dpo", "sft", ("preference.beta=0.2",), refused=True),
    "preference.loss": Case(run, "dpo", "ipo", PAIRED),
    "preference.beta": Case(run, "0.1", "0.9", PAIRED),
    "preference.label_smoothing": Case(run, "0", "0.3", PAIRED),
    "preference.margin": Case(run, "0.5", "2.0", (*PAIRED, "preference.loss=simpo")),
    "preference.sft_weight": Case(run, "0", "0.5", PAIRED),
    "preference.desirable_weight": Case(run, "1.0", "3.0", (*PAIRED, "preference.loss=kto")),
    "preference.undesirable_weight": Case(run, "1.0", "3.0", (*PAIRED, "preference.loss=kto")),
    "preference.length_normalised": Case(run, "false", "true", PAIRED),
    "preference.reference": Case(accepted, "precomputed", "adapter_off", PAIRED, refused=True),
    "method.rank": Case(plan, "4", "8", LORA),
    "method.alpha": Case(run, "4", "64", LORA),
    "method.dropout": Case(run, "0", "0.3", LORA),
    "method.targets": Case(plan, "all-linear", "attention", LORA),
    "method.exclude": Case(plan, "", '["q_proj"]', LORA),
    "method.layers": Case(plan, "[]", "[1]", LORA),
    "method.dora": Case(plan, "false", "true", LORA),
    "method.rslora": Case(run, "false", "true", LORA),
    "method.adapter_dtype": Case(plan, "float32", "bfloat16", (*LORA, "model.dtype=bfloat16")),
    "method.also_train": Case(plan, "", '["lm_head"]', LORA),
    "method.train_only": Case(plan, "", '["**.self_attn"]'),
    "method.freeze": Case(plan, "", '["**.mlp"]'),
    "data.sources.name": Case(data, "main", "other", HELD_OUT, at="data.sources.main.name"),
    "data.sources.path": Case(data, "SAMPLES", "CHATS", at="data.sources.main.path"),
    "data.sources.hub": Case(data, "", "some/data", at="data.sources.main.hub", refused=True),
    "data.sources.config": Case(accepted, "", "small", at="data.sources.main.config"),
    "data.sources.split": Case(data, "train", "train[:3]", at="data.sources.main.split"),
    "data.sources.format": Case(data, "prompt-completion", "text", at="data.sources.main.format", refused=True),
    "data.sources.template": Case(data, "none", "chat", at="data.sources.main.template"),
    "data.sources.unit": Case(data, "", "<|endoftext|>", at="data.sources.main.unit", refused=True),
    "data.sources.limit": Case(data, "", "3", at="data.sources.main.limit"),
    "data.sources.enabled": Case(data, "true", "false", at="data.sources.second.enabled"),
    "data.sources.weight": Case(order, "1.0", "3.0", at="data.sources.second.weight"),
    "data.sources.columns": Case(data, "", '{prompt = "completion"}', at="data.sources.main.columns"),
    "data.sources.roles": Case(
        data, "{}", '{system = "user"}', ("data.sources.main.path=CHATS",), at="data.sources.main.roles"
    ),
    "data.sources.image_root": Case(data, "", "./gone", IMAGES, at="data.sources.main.image_root", refused=True),
    "data.sources.prompt": Case(data, "what?", "where?", IMAGES, at="data.sources.main.prompt"),
    "data.sources.box_order": Case(data, "yxyx", "xyxy", IMAGES, at="data.sources.main.box_order"),
    "data.sources.box_scale": Case(data, "unit", "thousand", IMAGES, at="data.sources.main.box_scale"),
    "data.sources.box_text": Case(data, "qwen2", "json", IMAGES, at="data.sources.main.box_text"),
    "data.validation": Case(data, "", '[{name = "held-out", path = "SAMPLES"}]'),
    "data.max_length": Case(plan, "64", "128"),
    "data.over_length": Case(data, "drop", "truncate", ("data.max_length=16",)),
    "data.broken": Case(data, "skip", "refuse", ("data.sources.main.path=BROKEN",), refused=True),
    "data.overlap": Case(accepted, "0", "9999", refused=True),
    "data.shuffle": Case(order, "true", "false"),
    "data.mixing": Case(order, "weights", "probability"),
    "data.packing": Case(data, "false", "true"),
    "data.valid_fraction": Case(data, "0", "0.2"),
    "data.loss_on": Case(data, "completion", "all"),
    "data.template_args": Case(
        data, "{}", "{brief = true}", (f"model.chat_template={BRIEF}", "data.sources.main.template=chat")
    ),
    "data.workers": Case(children, "0", "1"),
    "data.system_prompt": Case(data, "", "be brief"),
    "data.image_min_pixels": Case(data, "", "12000", IMAGES),
    "data.image_max_pixels": Case(data, "", "4000", IMAGES),
    "train.epochs": Case(order, "1", "2", ("train.max_steps=",)),
    "train.max_steps": Case(order, "2", "3"),
    "train.batch_size": Case(order, "2", "4"),
    "train.micro_batch": Case(plan, "1", "2"),
    "train.learning_rate": Case(run, "1e-3", "1e-2"),
    "train.min_learning_rate": Case(run, "0", "5e-4", STEPS),
    "train.scheduler": Case(run, "cosine", "linear", STEPS),
    "train.power": Case(run, "1.0", "3.0", (*STEPS, "train.scheduler=polynomial")),
    "train.decay_ratio": Case(run, "", "1.0", (*STEPS, "train.scheduler=wsd")),
    "train.decay_shape": Case(run, "cosine", "1-sqrt", (*STEPS, "train.scheduler=wsd", "train.decay_ratio=1.0")),
    "train.restarts": Case(run, "1", "2", (*STEPS, "train.scheduler=cosine_with_restarts")),
    "train.warmup_ratio": Case(run, "", "0.5", STEPS),
    "train.warmup_steps": Case(run, "0", "2"),
    "train.optimizer": Case(plan, "adamw", "sgd"),
    "train.optimizer_offload": Case(plan, "false", "true"),
    "train.momentum": Case(plan, "0", "0.9", ("train.optimizer=sgd",)),
    "train.weight_decay": Case(run, "0", "0.5"),
    "train.betas": Case(run, "[0.9, 0.999]", "[0.5, 0.9]"),
    "train.eps": Case(run, "1e-8", "1e-2"),
    "train.max_grad_norm": Case(run, "0", "0.01", ("train.optimizer=sgd",)),
    "train.label_smoothing": Case(run, "0", "0.2"),
    "train.seed": Case(run, "1", "2"),
    "train.gradient_checkpointing": Case(plan, "true", "false"),
    "train.mlp_tiles": Case(plan, "1", "4", ("train.gradient_checkpointing=false",)),
    "train.activation_offload": Case(plan, "false", "true"),
    "train.loss": Case(plan, "plain", "chunked"),
    "train.compile": Case(proofs, "false", "true"),
    "train.deterministic": Case(environment, "false", "true", CUDA),
    "train.log_every_steps": Case(run, "1", "2"),
    "train.rounding": Case(plan, "exact", "stochastic", BF16),
    "train.state_dtype": Case(plan, "float32", "bfloat16", (*BF16, "train.rounding=stochastic")),
    "train.groups.match": Case(run, GROUP, GROUP.replace("mlp", "self_attn"), at=""),
    "train.groups.learning_rate": Case(run, GROUP, GROUP.replace("1e-2", "2e-2"), at=""),
    "train.groups.weight_decay": Case(run, GROUP, GROUP.replace("learning_rate=1e-2", "weight_decay=0.5"), at=""),
    "checkpoint.every_steps": Case(run, "", "1"),
    "checkpoint.per_epoch": Case(run, "", "99"),
    "checkpoint.every_minutes": Case(run, "0", "1e-9"),
    "checkpoint.keep": Case(run, "1", "2", (*STEPS, "checkpoint.every_steps=1")),
    "checkpoint.keep_best": Case(run, "1", "3", (*PICKED, "checkpoint.keep=1", "train.learning_rate=0.3")),
    "checkpoint.best_metric": Case(run, "loss", "exact_match", (*PICKED, 'eval.metrics=["loss", "exact_match"]')),
    "checkpoint.result": Case(run, "last", "best", (*PICKED, "train.learning_rate=0.3")),
    "eval.every_steps": Case(run, "", "1", HELD_OUT),
    "eval.per_epoch": Case(run, "", "2", HELD_OUT),
    "eval.at_start": Case(run, "false", "true", HELD_OUT),
    "eval.limit": Case(run, "1", "2", HELD_OUT),
    "eval.metrics": Case(run, '["loss"]', '["exact_match"]', (*ANSWERS, "checkpoint.best_metric=")),
    "eval.samples": Case(run, "0", "1", ANSWERS),
    "eval.prompts": Case(run, "[]", '["ab"]', ANSWERS),
    "eval.early_stopping_patience": Case(run, "", "1", (*PICKED, "train.learning_rate=0.3")),
    "eval.early_stopping_threshold": Case(run, "0", "100", (*PICKED, "eval.early_stopping_patience=1")),
    "evaluate.metrics": Case(score, '["loss"]', '["loss", "exact_match"]', ANSWERS),
    "evaluate.limit": Case(score, "1", "2", HELD_OUT),
    "evaluate.log_samples": Case(score, "0", "1", ANSWERS),
    "evaluate.sources": Case(score, "", '[{name = "apart", path = "OTHERS"}]', HELD_OUT),
    "evaluate.harness": Case(tasks, "[]", '["gsm8k"]'),
    "evaluate.harness_fewshot": Case(tasks, "0", "1"),
    "evaluate.harness_template": Case(tasks, "auto", "off"),
    "evaluate.harness_include": Case(tasks, "", "no-such-folder", refused=True),
    "moe.freeze_router": Case(plan, "true", "false", ("model.id=mistralai/Mixtral-8x7B-v0.1",)),
    "moe.aux_loss_weight": Case(plan, "0", "0.01", ("model.id=mistralai/Mixtral-8x7B-v0.1",)),
    "moe.watch_experts": Case(plan, "false", "true", ("model.id=mistralai/Mixtral-8x7B-v0.1", "moe.aux_loss_weight=0")),
    "generate.max_new_tokens": Case(score, "4", "6", HELD_OUT),
    "generate.temperature": Case(score, "0", "3.0", ANSWERS),
    "generate.top_k": Case(score, "0", "2", SAMPLED),
    "generate.top_p": Case(score, "1.0", "0.01", SAMPLED),
    "generate.repetition_penalty": Case(score, "1.0", "100.0", ANSWERS),
    "generate.seed": Case(score, "1", "2", SAMPLED),
    "backoff.ladder": Case(run, '["retry", "cut"]', '["retry"]', TIGHT),
    "backoff.allow_learning_changes": Case(run, "[]", '["max_length"]', LONGEST),
    "backoff.grow": Case(grown, "true", "false"),
    "trackers.use": Case(tracked, "", '["wandb"]'),
    "trackers.project": Case(tracked, "", "mine"),
    "trackers.tags": Case(tracked, "", '["one"]'),
    "trackers.result": Case(tracked, "false", "true", ('trackers.use=["wandb"]',)),
    "finish.merge": Case(accepted, "false", "true"),
    "finish.webhook": Case(destinations, "", "http://127.0.0.1/one"),
    "finish.push": Case(destinations, "", "me/model"),
    "finish.push_public": Case(destinations, "false", "true", ("finish.push=me/model",)),
    "sweep": Case(points, '{"train.seed" = [1]}', '{"train.seed" = [1, 2]}'),
    "stages.name": stage('name = "b"'),
    "stages.kind": stage('kind = "assemble"', refused=True),
    "stages.from": Case(stages, CHAIN, CHAIN.replace(', from = "a"', ""), at="stages"),
    "stages.enabled": stage("enabled = false", refused=True),
    "stages.experts_per_token": stage("experts_per_token = 2", refused=True),
    "stages.shared": stage('shared = ["lm_head"]', refused=True),
    "stages.router": stage('router = "hidden"', refused=True),
    "stages.model": stage('model = {dtype = "bfloat16"}'),
    "stages.method": stage('method = {kind = "lora"}'),
    "stages.preference": stage('method = {objective = "dpo"}, preference = {beta = 0.2}'),
    "stages.data": stage("data = {max_length = 32}"),
    "stages.train": stage("train = {batch_size = 3}"),
    "stages.checkpoint": stage("checkpoint = {keep = 5}"),
    "stages.eval": stage("eval = {samples = 1}"),
    "stages.evaluate": stage("evaluate = {limit = 1}"),
    "stages.moe": stage("moe = {freeze_router = true}"),
    "stages.generate": stage("generate = {seed = 3}"),
    "stages.backoff": stage("backoff = {grow = false}"),
    "stages.finish": Case(stages, MERGED.replace("true", "false"), MERGED, LORA, at="stages"),
    # profile
    "profile.schema": Case(accepted, "1", "2", at="schema"),
    "profile.kind": Case(accepted, "profile", "recipe", at="kind"),
    "device.kind": Case(environment, "cpu", "cuda", ("device.compute_capability=",)),
    "device.count": Case(plan, "2", "4", ("parallel.strategy=replicated",)),
    "device.memory_gib": Case(plan, "1", "2"),
    "device.reserve_gib": Case(plan, "0", "0.5"),
    "device.host_memory_gib": Case(plan, "1", "0.5"),
    "device.compute_capability": Case(plan, "7.5", "9.0", (*CUDA, "model.dtype=auto")),
    "device.bandwidth_gbs": Case(plan, "1", "2", (*HELD_OUT, "eval.samples=1", "generate.max_new_tokens=100")),
    "device.peak_tflops": Case(run, "", "1"),
    "device.price_per_hour": Case(
        plan, "1", "2", ("device.peak_tflops=9", "device.bandwidth_gbs=9", "train.max_steps=9")
    ),
    "device.allocator": Case(environment, "", "expandable_segments:True", CUDA),
    "parallel.strategy": Case(plan, "replicated", "sharded", TWO),
    "parallel.shard": Case(plan, "gradients", "parameters", (*TWO, "parallel.strategy=sharded")),
    "parallel.sequence": Case(plan, "1", "2", (*TWO, "parallel.strategy=replicated")),
    "parallel.timeout_seconds": Case(run, "600", "1e-3"),
    "nodes.count": Case(script, "2", "3", SLURM),
    "nodes.launcher": Case(script, "slurm", "skypilot", SLURM[:-1]),
    "nodes.partition": Case(script, "", "gpu", SLURM),
    "nodes.account": Case(script, "", "me", SLURM),
    "nodes.time_limit": Case(script, "", "1:00:00", SLURM),
    "nodes.cloud": Case(script, "", "aws", SKYPILOT),
    "nodes.accelerators": Case(script, "H100", "A100", (*SKYPILOT, *CUDA)),
    "nodes.max_restarts": Case(script, "3", "4", SLURM),
    "overrides": Case(plan, "", "train.batch_size = 3"),
}

ONLY_READ_BY_PEOPLE = {"name", "title", "notes", "profile"}
"""Keys that name and describe files in lists; `tests/config/test_library.py` looks at these."""


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every key of a table, and of the tables and lists of tables inside it. Lists of tables of one
    type are walked once."""
    walked: set[type[BaseModel]] = set()
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        table = next((kind for kind in _types(field.annotation) if issubclass(kind, BaseModel)), None)
        if table is None or table in walked or (prefix == "evaluate." and name == "sources"):
            yield key
        else:
            walked.add(table)
            yield from keys_of(table, f"{key}.")


def _types(annotation: Any) -> Iterator[type]:
    """The classes in a type annotation."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def all_keys() -> set[str]:
    """Every key of recipes and profiles, as `CASES` names it."""
    head = {"schema", "kind", *ONLY_READ_BY_PEOPLE}
    found = {f"{kind}.{key}" for kind in ("recipe", "profile") for key in ("schema", "kind")}
    return found | {key for model in (Recipe, Profile) for key in keys_of(model) if key not in head}


_seen: dict[str, Any] = {}
"""What a probe showed of a spec: many cases share one of their two runs."""


def outcome(case: Case, key: str, value: str, files: dict[str, Path], folder: Path) -> tuple[bool, Any]:
    """(True, what the case's probe returns) if this value of the key is accepted; (False, the error message) if it is
    refused."""
    place = key if case.at is None else case.at
    if place in ("schema", "kind", "overrides"):
        files, sets = _written(files, key, value, folder), []
    else:
        sets = [*case.given, f"{place}={value}" if place else value]
    for word, path in files.items():
        sets = [text.replace(word, str(path)) for text in sets]
    try:
        spec = resolve(str(files["PROFILE"]), str(files["RECIPE"]), sets).spec
        refuse_unsupported(spec)
        refuse_with_model(spec, find_facts(spec.recipe.model))
        same = f"{case.probe.__name__} {spec.model_dump_json(include={'name', 'profile', 'recipe'})}"
        if same not in _seen:
            _seen[same] = case.probe(spec, folder)
        return True, _seen[same]
    except TunedeckError as error:
        return False, str(error)


def _written(files: dict[str, Path], key: str, value: str, folder: Path) -> dict[str, Path]:
    """Write copies of the files in which this key has another value, for keys that `--set` cannot change. Returns the
    files, with the copy in place of the profile or the recipe."""
    file, _, name = key.rpartition(".")
    word = file.upper() or "PROFILE"
    new = folder / files[word].name
    text = files[word].read_text()
    if name == "overrides":
        new.write_text(f"{text}\n[overrides]\n{value}\n")
    else:
        line = f"{name} = {value}" if name == "schema" else f'{name} = "{value}"'
        new.write_text(re.sub(rf"(?m)^{name} = .*$", line, text, count=1))
    return {**files, word: new}
