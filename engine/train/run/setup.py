"""Builds what a run works on from its spec: data, model, loss, optimizer, micro-batch budget, in this order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase

from engine.architecture.lookup import ModelFacts
from engine.batching.predicted_cost import MicroBatchCost, cost_when_padded, micro_batch_cost, with_largest_image
from engine.budget.advise.plan import Plan
from engine.checks.run import ENGINE, ENGINE_FILES, check_model
from engine.config.changes import with_changes
from engine.config.check.notes import warmup_note
from engine.config.files.caches import SequenceBounds
from engine.config.parameter_groups import describe_groups
from engine.config.schema.recipe import Train
from engine.config.schema.run import RunSpec
from engine.data.images import ImageProcessor
from engine.data.order import MixedOrder, SampleOrder
from engine.data.prepare import PreparedData, prepare_data
from engine.data.tokenise import tokenizer_hash
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import retry_on_oom
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.journal.events import Journal
from engine.model.config import model_config_dict
from engine.model.cudnn_attention import cudnn_attention
from engine.model.decoder import require_images
from engine.model.flops import step_flops
from engine.model.load import LoadedModel, fuse_modules
from engine.model.loaded import tile_mlps
from engine.model.tokenizer import load_image_processor, load_tokenizer
from engine.model.verify import require_known_family, require_separation
from engine.train.run.identity import Identity
from engine.train.run.oom_report import fixes_sentence
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.context import LossScaler, StepContext
from engine.train.step.failures import LocalRecoveries, RecoveredOom
from engine.train.step.interface import Strategy
from engine.train.step.ladder import effective_spec
from engine.train.step.optimizer import Schedule, guarded_optimizer
from engine.train.step.rollback import Rollback
from engine.train.strategy.load import load_strategy


def set_up(
    spec: RunSpec,
    device: Device,
    journal: Journal,
    report: Callable[[RecoveredOom], None],
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainingSetup:
    """Prepare data, load the model, allocate optimizer state; every phase is written to the journal.

    DataError: the data are missing, unusable, or nothing is left to train on. UsageError: the recipe does not suit the
    model or the data. EnvironmentProblem: something cannot be fetched, or is not installed. MemoryExhaustedError:
    memory ran out in every attempt to load the model. LostRankError: another rank could not go on.
    """
    recipe = asked = spec.recipe
    if ranks.size > 1:
        ranks.host_region, device.patience_seconds = device.host_region, ranks.patience_seconds
    journal.phase("tokenising")
    # Before anything is fetched from the hub: a wrong path should not cost a download.
    check_model(spec, command=ENGINE_FILES)
    tokenizer = load_tokenizer(recipe.model, trust_remote_code=spec.limits.trust_remote_code)
    images = load_image_processor(spec, tokenizer)
    facts = ModelFacts.of_config(model_config_dict(spec))
    check_model(spec, facts, command=ENGINE, has_images=True)  # as far as it can be told before the data are read
    with device.host_region():
        prepared = _prepared(spec, tokenizer, images, journal, ranks)
    order, total_steps = make_order(prepared.train, spec)
    if (note := warmup_note(recipe.train, total_steps)) and recipe.train.max_steps != total_steps:
        journal.warn("warmup", note)  # with max_steps it was said before the start
    check_model(spec, facts, command=ENGINE, has_images=prepared.train.has_images)
    spec = with_largest_image(spec, prepared.train, images)
    spec, micro_batches = planned(spec, device, prepared.bounds, journal, ranks)
    recipe = spec.recipe
    journal.phase("loading model", recipe.model.id)
    local_recoveries = LocalRecoveries(ranks, report)
    strategy = load_strategy(spec, device, tokenizer, ranks, report, local_recoveries.note)
    strategy.loaded.images = images
    fuse_modules(strategy.loaded, spec)
    tile_mlps(strategy.loaded, recipe)
    _tell_loading(strategy.loaded, recipe.train, journal)
    _try_model(strategy.loaded, spec, ranks)
    pad_id = int(tokenizer.pad_token_id)
    context = _step_context(spec, device, strategy, prepared, micro_batches, pad_id, report, local_recoveries)
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
        flops=step_flops(strategy.loaded),
    )


def _tell_loading(loaded: LoadedModel, train: Train, journal: Journal) -> None:
    """Write what was read of the weight files, how sharded weights came to the ranks, what each of [[train.groups]]
    has, and the model's notices."""
    for account in loaded.accounts:
        journal.write("weights", **account.event())
    if loaded.loading:
        journal.phase("loading model", loaded.loading)
    if train.groups:
        names = loaded.names_of(name for name, _ in loaded.trainable())
        journal.phase("loading model", describe_groups(train.groups, names))
    for notice in loaded.notices:
        journal.warn("model", notice)


def _try_model(loaded: LoadedModel, spec: RunSpec, ranks: Ranks) -> None:
    """Raise UsageError if the model as loaded does not compute what training relies on. Sharded weights cannot be run
    before the first step."""
    if ranks.size > 1 and spec.profile.parallel.strategy == "sharded":
        if spec.recipe.data.packing:
            require_known_family(loaded.config.get_text_config().model_type)
        return
    require_images(loaded)
    if spec.recipe.data.packing:
        require_separation(loaded)


def _step_context(
    spec: RunSpec,
    device: Device,
    strategy: Strategy,
    prepared: PreparedData,
    micro_batches: MicroBatchCost,
    pad_id: int,
    report: Callable[[RecoveredOom], None],
    local_recoveries: LocalRecoveries,
) -> StepContext:
    """Allocates the optimizer's state."""
    train, backoff, loaded, loss = spec.recipe.train, spec.recipe.backoff, strategy.loaded, strategy.loss
    longest, recomputing = int(prepared.train.lengths.max()), micro_batches.recomputing
    cudnn = cudnn_attention(spec, device, loaded, longest)
    padded = (lambda cost: cost) if cudnn is None else partial(cost_when_padded, longest=longest)
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
        data=prepared.train,
        bounds=prepared.bounds,
        cost=padded(micro_batches.cost),
        budget=micro_batches.budget,
        ladder=[*backoff.ladder, *backoff.allow_learning_changes],
        pad_id=pad_id,
        seed=train.seed,
        max_grad_norm=train.max_grad_norm,
        may_grow=backoff.grow and device.kind != "cpu",
        measures=device.kind != "cpu",
        cost_recomputing=recomputing and (lambda layers: padded(recomputing(layers))),
        cudnn=cudnn,
        report=report,
        local_recoveries=local_recoveries,
        suggest_fixes=lambda oom: fixes_sentence(effective_spec(spec, context), oom, prepared.bounds.targets),
    )
    return context


def _prepared(
    spec: RunSpec,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    journal: Journal,
    ranks: Ranks,
) -> PreparedData:
    """Rank 0 tokenises the data unless they are cached; then the other ranks read the cache."""
    made: list[PreparedData] = []

    def prepare() -> None:
        made.append(prepare_data(spec, tokenizer, images, notify=lambda text: journal.phase("tokenising", text)))

    ranks.run_on_rank0(prepare)
    if not made:
        prepare()
    return made[0]


def make_order(data: TokenData, spec: RunSpec) -> tuple[SampleOrder, int]:
    """The order of the kept samples, and the number of optimizer steps; one epoch if the recipe sets neither."""
    train = spec.recipe.train
    epochs = train.epochs if train.epochs or train.max_steps else 1.0
    if spec.recipe.data.mixing == "probability":
        weights = [source.weight for source in spec.recipe.data.sources if source.enabled]
        mixed = MixedOrder(data.source_of, weights, seed=train.seed, batch_size=train.batch_size, epochs=epochs)
        return mixed, mixed.steps(epochs, train.max_steps)
    order = SampleOrder(
        data.weights[0::2] if data.in_pairs else data.weights,
        seed=train.seed,
        shuffle=spec.recipe.data.shuffle,
        batch_size=train.batch_size,
        epochs=epochs,
        in_pairs=data.in_pairs,
    )
    return order, order.steps(epochs, train.max_steps)


def planned(
    spec: RunSpec, device: Device, known: SequenceBounds, journal: Journal, ranks: Ranks = SINGLE_PROCESS
) -> tuple[RunSpec, MicroBatchCost]:
    """Write the plan for the kept sequences; returns (the spec to start with, its micro-batch cost). The spec has the
    number of layers that recompute in place of "auto".

    Where only a smaller micro-batch or a remedy fits, the run starts with it, except with `--force` and on the metered
    device, where a run starts as it is written, to show what happens.
    """
    micro_batches = micro_batch_cost(spec, known)
    if micro_batches.plan is None:
        journal.warn(
            "unknown_architecture",
            "memory cannot be predicted for this architecture; micro-batches start small and adapt during the run",
            "set train.micro_batch to a number that fits",
        )
        return _with_layers(spec, micro_batches, known, ranks)
    _write_plan(micro_batches.plan, journal)
    if micro_batches.plan.verdict != "fits_smaller" or device.simulated or spec.limits.as_written:
        return _with_layers(spec, micro_batches, known, ranks)
    changes = ", ".join(f"{key} = {value}" for key, value in micro_batches.plan.remedies.items())
    journal.warn(
        "fits_smaller", f"the recipe as written does not fit; starting with {changes}, which gives the same result", ""
    )
    spec = with_changes(spec, micro_batches.plan.remedies)
    return _with_layers(spec, micro_batch_cost(spec, known), known, ranks)


def _with_layers(
    spec: RunSpec, micro_batches: MicroBatchCost, known: SequenceBounds, ranks: Ranks
) -> tuple[RunSpec, MicroBatchCost]:
    """`spec` with the layers that recompute on rank 0: what machines have learned of their devices, and with it their
    plans, may differ."""
    layers = ranks.broadcast_object(micro_batches.checkpointing)
    spec = with_changes(spec, {"train.gradient_checkpointing": layers})
    agree = (type(layers), layers) == (type(micro_batches.checkpointing), micro_batches.checkpointing)
    return spec, micro_batches if agree else micro_batch_cost(spec, known)


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
        target_tokens=document["target_tokens"],
        generate_adds_bytes=document["generate_adds_bytes"],
        accumulation=document["accumulation"],
        tokens_per_micro_batch=document["tokens_per_micro_batch"],
        layers=document["layers"],
        recomputed_layers=document["recomputed_layers"],
    )
