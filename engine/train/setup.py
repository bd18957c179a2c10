"""Builds what a run works on from its spec: data, model, loss, optimizer, micro-batch budget, in this order.

Steps are not taken here. Try: `tunedeck train -p demo -r demo`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.batching.cost import MicroBatchCost, micro_batch_cost, with_largest_image
from engine.budget.advise.changes import with_changes
from engine.budget.advise.pattern_matches import refuse_patterns
from engine.budget.advise.plan import Plan
from engine.budget.architecture.facts import from_config
from engine.budget.architecture.positions import refuse_long_sequences
from engine.budget.architecture.sequence_parallel_support import refuse_sequence_parallel
from engine.budget.architecture.trainable_families import refuse_family
from engine.data.images import ImageProcessor
from engine.data.order import SampleOrder
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokenise import tokenizer_hash
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import retry_on_oom
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.errors import UnknownArchitectureError
from engine.model.config import check_packing, model_config_dict
from engine.model.image_processor import load_image_processor
from engine.model.load import LoadedModel
from engine.model.tokenizer import load_tokenizer
from engine.spec.check.notes import warmup_note
from engine.spec.files.data_files import require_data_files
from engine.spec.schema.run import RunSpec
from engine.train.checkpoint.run_state import Identity
from engine.train.monitor.journal import Journal
from engine.train.recovery.local_recoveries import LocalRecoveries
from engine.train.recovery.memory_settings import effective_spec
from engine.train.recovery.oom_report import fixes_sentence
from engine.train.recovery.records import RecoveredOom
from engine.train.schedule import Schedule
from engine.train.step.context import StepContext
from engine.train.step.loss_scaler import LossScaler
from engine.train.step.optimizer import guarded_optimizer
from engine.train.step.rollback import Rollback
from engine.train.strategy.base import Strategy
from engine.train.strategy.load import load_strategy


@dataclass
class TrainingSetup:
    """Everything that a run needs for its first step."""

    spec: RunSpec
    context: StepContext
    prepared: PreparedData
    order: SampleOrder
    schedule: Schedule
    total_steps: int
    identity: Identity
    flops_per_token: float


def set_up(
    spec: RunSpec,
    device: Device,
    journal: Journal,
    report: Callable[[RecoveredOom], None],
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainingSetup:
    """Prepare data, load the model, allocate optimizer state; returns everything that the first step needs. Every phase
    is written to the journal; `report` is called with each allocation failure.

    Raises:
        DataError: the data are missing, unusable, or nothing is left to train on.
        UsageError: the recipe does not suit the model or the data.
        EnvironmentProblem: something that the recipe needs cannot be fetched, or is not installed.
        MemoryExhaustedError: memory ran out in every attempt to load the model.
        LostRankError: another rank could not go on.
    """
    recipe = asked = spec.recipe
    if ranks.size > 1:
        ranks.host_region, device.patience_seconds = device.host_region, ranks.patience_seconds
    journal.phase("tokenising")
    # Before anything is fetched from the hub: a wrong path should not cost a download.
    require_data_files(recipe)
    tokenizer = load_tokenizer(recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    images = load_image_processor(spec, tokenizer)
    with device.host_region():
        prepared = _prepared(spec, tokenizer, images, journal, ranks)
    order, total_steps = make_order(prepared.train, spec)
    if (note := warmup_note(recipe.train, total_steps)) and recipe.train.max_steps != total_steps:
        journal.warn("warmup", note)  # with max_steps it was said before the start
    _refuse_unsafe(spec, has_images=prepared.train.has_images)
    spec = with_largest_image(spec, prepared.train, images)
    spec, micro_batches = planned(spec, device, int(prepared.train.lengths.max()), journal)
    recipe = spec.recipe
    journal.phase("loading model", recipe.model.id)
    local_recoveries = LocalRecoveries(ranks, report)
    strategy = load_strategy(spec, device, tokenizer, ranks, report, local_recoveries.note)
    strategy.loaded.images = images
    _tell_loading(strategy.loaded, journal)
    pad_id = int(tokenizer.pad_token_id)
    context = _step_context(spec, device, strategy, prepared.train, micro_batches, pad_id, report, local_recoveries)
    device.release_cached()
    context.static_bytes = device.memory().allocated_bytes
    return TrainingSetup(
        spec=spec,
        context=context,
        prepared=prepared,
        order=order,
        schedule=Schedule.of(recipe.train, total_steps),
        total_steps=total_steps,
        identity=Identity.of(asked, prepared.fingerprint, tokenizer_hash(tokenizer)),
        flops_per_token=flops_per_token(strategy.loaded),
    )


def _tell_loading(loaded: LoadedModel, journal: Journal) -> None:
    """Write to the journal how the weights came to the ranks, if they are sharded, and the model's notices."""
    if loaded.loading:
        journal.phase("loading model", loaded.loading)
    for notice in loaded.notices:
        journal.warn("model", notice)


def _refuse_unsafe(spec: RunSpec, has_images: bool) -> None:
    """Raise UsageError or DataError for a recipe with which this model would be trained wrongly, or which trains only
    modules that its samples do not use (a vision encoder without images, say). Reads the model's config from this
    machine."""
    facts = model_config_dict(spec)
    refuse_sequence_parallel(facts, spec)
    refuse_family(facts, spec.recipe)
    refuse_long_sequences(facts, spec.recipe)
    with suppress(UnknownArchitectureError):  # the names of other families are known once their model is loaded
        refuse_patterns(from_config(facts), spec.recipe, has_images=has_images)


def _step_context(
    spec: RunSpec,
    device: Device,
    strategy: Strategy,
    data: TokenData,
    micro_batches: MicroBatchCost,
    pad_id: int,
    report: Callable[[RecoveredOom], None],
    local_recoveries: LocalRecoveries,
) -> StepContext:
    """Build the context that all steps share; allocates the optimizer's state."""
    train, backoff, loaded, loss = spec.recipe.train, spec.recipe.backoff, strategy.loaded, strategy.loss
    guard = retry_on_oom(
        lambda: guarded_optimizer(train, loaded, device), "optimizer_state", device, local_recoveries.note
    )
    context = StepContext(
        device=device,
        ranks=strategy.ranks,
        strategy=strategy,
        loaded=loaded,
        loss=loss,
        optimizer=guard.optimizer,
        guard=guard,
        rollback=Rollback(loaded.model, device, train.seed),
        scaler=LossScaler.start(loaded.needs_loss_scaling),
        data=data,
        cost=micro_batches.cost,
        budget=micro_batches.budget,
        ladder=[*backoff.ladder, *backoff.allow_learning_changes],
        pad_id=pad_id,
        seed=train.seed,
        max_grad_norm=train.max_grad_norm,
        may_grow=backoff.grow and device.kind != "cpu",
        measures=device.kind != "cpu",
        report=report,
        local_recoveries=local_recoveries,
        suggest_fixes=lambda oom: fixes_sentence(effective_spec(spec, context), oom),
    )
    return context


def _prepared(
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    journal: Journal,
    ranks: Ranks,
) -> PreparedData:
    """The tokenised data. Rank 0 makes it unless it is cached; then the other ranks read it from the cache."""
    check_packing(spec)
    made: list[PreparedData] = []

    def prepare() -> None:
        made.append(prepare_data(spec, tokenizer, images, notify=lambda text: journal.phase("tokenising", text)))

    ranks.run_on_rank0(prepare)
    if not made:
        prepare()
    return made[0]


def make_order(data: TokenData, spec: RunSpec) -> tuple[SampleOrder, int]:
    """The order of the kept samples, and the number of optimizer steps. One epoch if the recipe sets neither epochs nor
    steps."""
    train = spec.recipe.train
    epochs = train.epochs if train.epochs or train.max_steps else 1.0
    order = SampleOrder(
        data.weights,
        seed=train.seed,
        shuffle=spec.recipe.data.shuffle,
        batch_size=train.batch_size,
        epochs=epochs,
    )
    return order, order.steps(epochs, train.max_steps)


def planned(spec: RunSpec, device: Device, longest: int, journal: Journal) -> tuple[RunSpec, MicroBatchCost]:
    """Write the plan for the longest kept sequence to the journal; returns (the spec that the run starts with, its
    micro-batch cost). `longest` is the sequence's length in tokens.

    Where only a smaller micro-batch or a remedy fits, the run starts with it, except with `--force` and on the metered
    device, where a run starts as it is written, to show what happens.
    """
    micro_batches = micro_batch_cost(spec, longest)
    if micro_batches.plan is None:
        journal.warn(
            "unknown_architecture",
            "memory cannot be predicted for this architecture; micro-batches start small and what fits is learned",
            "set train.micro_batch to a number you know to fit",
        )
        return spec, micro_batches
    _write_plan(micro_batches.plan, journal)
    if micro_batches.plan.verdict != "fits_smaller" or device.simulated or spec.limits.as_written:
        return spec, micro_batches
    changes = ", ".join(f"{key} = {value}" for key, value in micro_batches.plan.remedies.items())
    journal.warn("fits_smaller", f"as written this does not fit; it starts with {changes}, which learns the same", "")
    spec = with_changes(spec, micro_batches.plan.remedies)
    return spec, micro_batch_cost(spec, longest)


def flops_per_token(loaded: LoadedModel) -> float:
    """Model FLOPs to train one token, over all weight matrices: 2 per weight for forward, 2 for the gradient of its
    input, and 2 for the gradient of the weight itself if it is trained. Recomputation does not count (PaLM, appendix B,
    on MFU)."""
    matrices = [(p.numel(), p.requires_grad) for p in loaded.model.parameters() if p.dim() >= 2]
    return float(sum(4 * count + 2 * count * learns for count, learns in matrices))


def _write_plan(plan: Plan, journal: Journal) -> None:
    document = plan.as_json()
    journal.write(
        "plan",
        predicted={"peak_bytes": document["peak_bytes"], "components": document["components"]},
        verdict=document["verdict"],
        capacity_bytes=document["capacity_bytes"],
        deciding_phase=document["deciding_phase"],
        micro_batch=document["micro_batch"],
        remedies=document["remedies"],
        length=document["length"],
        basis=document["basis"],
        generate_adds_bytes=document["generate_adds_bytes"],
        accumulation=document["accumulation"],
        tokens_per_micro_batch=document["tokens_per_micro_batch"],
    )
