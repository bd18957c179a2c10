"""The recipe: what is trained, how, on what data, and what comes out.

Data only, with a docstring per field (they become the JSON Schema). Each default here is the one default of the
project. Rules that span fields live in `engine.spec.check.rules`, reading and merging in `engine.spec.load`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from engine.spec.schema.base import Count, CountOrZero, Fraction, Name, NonNegative, Positive, Table


class Model(Table):
    """The model to start from."""

    id: str
    """Hub id, folder, "builtin:tiny", or "run:RUN[@STEP|@best]" to go on from an earlier run."""
    tokenizer: str | None = None
    """Hub id, folder or "builtin:bytes"; by default the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    adapter: str | None = None
    """A LoRA adapter to continue: hub id, folder, or "run:RUN[@STEP|@best]"."""
    chat_template: str | None = None
    """A Jinja chat template (text, or a path ending in .jinja) used instead of the tokenizer's."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the base weights. auto: bfloat16 where the device has it, else float16 on CUDA, float32 on a CPU."""
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    """Attention kernel. auto: flash where installed and supported, else sdpa."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4 stores the frozen base in 4 bits (bitsandbytes, CUDA only)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: weights of the real shapes without a download, for rehearsals."""


class Method(Table):
    """Which weights learn."""

    kind: Literal["lora", "full"] = "lora"
    """lora: low-rank adapters beside a frozen base; full: the weights themselves."""
    rank: Count = 16
    """LoRA rank."""
    alpha: Positive | None = None
    """The update is scaled by alpha/rank (alpha/sqrt(rank) with rslora). By default twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """LoRA dropout; masks are keyed by (seed, step, sample, module), whatever the split."""
    targets: Literal["all-linear", "attention"] | list[str] = "all-linear"
    """What gets adapters: every linear layer but the head, the attention projections, or globs on module names."""
    exclude: list[str] = []
    """Globs on module names that get no adapter."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    adapter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the adapters."""
    also_train: list[str] = []
    """Beside LoRA: parameters trained in full (globs on dotted names; "**" crosses dots)."""
    train_only: list[str] = []
    """With kind = "full": only these parameters learn."""
    freeze: list[str] = []
    """Parameters that stay as they are."""

    @property
    def effective_alpha(self) -> float:
        """alpha as written, else twice the rank."""
        return float(self.alpha if self.alpha is not None else 2 * self.rank)


class Source(Table):
    """One source of samples: a file, a folder of files, a hub data set, or a built-in generator."""

    name: Name
    """How --set addresses it: data.sources.NAME.enabled=false."""
    path: str | None = None
    """File, folder, glob, or "builtin:dates". Relative to the recipe's folder when that was given as a path."""
    hub: str | None = None
    """Name of a data set on the hub."""
    config: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of the data set, such as "train" or "train[:1000]"."""
    format: Literal["auto", "text", "prompt-completion", "chat", "alpaca", "sharegpt", "image-chat"] = "auto"
    """How the columns are read; auto recognises them by name."""
    limit: Count | None = None
    """At most this many samples, the first ones."""
    enabled: bool = True
    """false leaves the source out."""
    weight: Positive = 1.0
    """How often each sample of this source comes in an epoch; fractions are drawn by seed."""
    columns: dict[str, str] = {}
    """Our column name = the file's, such as prompt = "question"."""
    image_root: str | None = None
    """Folder that relative image paths start from."""


class Data(Table):
    """From files to token sequences."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """What is trained on."""
    validation: list[Source] = []
    """A validation set of its own, instead of valid_fraction."""
    max_length: Count = 2048
    """Longest sequence in tokens."""
    over_length: Literal["drop", "truncate"] = "drop"
    """What happens to longer samples."""
    shuffle: bool = True
    """Another order each epoch, a pure function of seed and epoch."""
    packing: bool = False
    """Put several documents into one sequence, kept apart by attention."""
    valid_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the samples held out for evaluation, drawn by seed."""
    loss_on: Literal["completion", "all"] = "completion"
    """completion: loss on completions and assistant turns; all: on every token."""
    workers: CountOrZero = 0
    """Processes that tokenise; 0 does it in the engine's own."""
    system_prompt: str | None = None
    """Put before every conversation that has no system turn."""
    image_min_pixels: Count | None = None
    """Smallest image, in pixels, for models that resize."""
    image_max_pixels: Count | None = None
    """Largest image, in pixels, for models that resize; a plan takes one of this size for every sequence."""


class ParameterGroup(Table):
    """Parameters with their own rate or decay."""

    match: str
    """Glob on dotted parameter names; "**" crosses dots."""
    learning_rate: Positive | None = None
    """Peak learning rate of these parameters."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters."""


class Train(Table):
    """The optimisation."""

    epochs: Positive | None = None
    """Passes over the data; 1 when neither epochs nor max_steps is given. The first of the two reached ends the run."""
    max_steps: Count | None = None
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences per optimizer step over all devices: the effective batch, never changed silently."""
    micro_batch: Literal["auto"] | Count = "auto"
    """Sequences per forward pass to start from, at the longest length; auto takes it from the budget."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    min_learning_rate: NonNegative = 0.0
    """Where the schedule ends."""
    scheduler: Literal["cosine", "linear", "constant", "cosine_with_restarts"] = "cosine"
    """Shape of the learning rate after warm-up."""
    restarts: Count = 1
    """Cycles of cosine_with_restarts."""
    warmup_ratio: Fraction | None = None
    """Share of the steps spent warming up."""
    warmup_steps: CountOrZero | None = None
    """Steps spent warming up."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """adamw is torch's fused one; adamw_8bit needs bitsandbytes on CUDA."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices; biases and norms are left out."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Adam's two averages."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm here; 0 does not clip."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of probability spread over the vocabulary."""
    seed: CountOrZero = 0
    """Seed of order, initial weights, dropout and generated data."""
    gradient_checkpointing: bool = True
    """Recompute activations in backward."""
    activation_offload: bool = False
    """Keep saved activations in host memory."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How the loss is computed; auto never holds tokens x vocabulary."""
    compile: bool = False
    """torch.compile the decoder layers."""
    deterministic: bool = False
    """Deterministic kernels: bit-for-bit resume on CUDA."""
    log_every_steps: Count = 1
    """Steps per step event."""
    groups: list[ParameterGroup] = []
    """Parameters with their own rate or decay; the first match counts."""


class Checkpoint(Table):
    """When a run is written down."""

    every_steps: Count | None = None
    """Optimizer steps between checkpoints."""
    every_minutes: NonNegative = 30.0
    """Minutes between checkpoints; 0 switches it off."""
    keep: Count = 2
    """How many of the newest are kept; the best is kept apart."""
    best_metric: str = "loss"
    """Which evaluation metric names the best checkpoint; loss and perplexity are better low, all others high."""
    result: Literal["best", "last"] = "last"
    """Which weights become the result."""


class Eval(Table):
    """Evaluation inside training."""

    every_steps: Count | None = None
    """Optimizer steps between evaluations; by default once at the end when there is a validation set."""
    at_start: bool = False
    """Also before the first step."""
    limit: Count | None = None
    """At most this many validation samples."""
    metrics: list[Literal["loss", "exact_match"]] = ["loss"]
    """exact_match generates greedily and compares with the reference."""
    samples: CountOrZero = 0
    """How many generated samples are logged each time."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without improvement of checkpoint.best_metric."""
    early_stopping_threshold: NonNegative = 0.0
    """What counts as an improvement."""


class Evaluate(Table):
    """Evaluation after training (`tunedeck eval`)."""

    metrics: list[Literal["loss", "exact_match", "rouge", "box_iou", "detection_rate"]] = ["loss"]
    """What is scored."""
    limit: Count | None = None
    """At most this many samples."""
    log_samples: CountOrZero = 5
    """How many generated samples are kept."""
    sources: list[Source] = []
    """Data to score on; by default the recipe's validation set."""


class Moe(Table):
    """Mixture-of-experts models."""

    aux_loss_weight: NonNegative | None = None
    """Weight of the load-balancing loss; by default the model's own."""
    freeze_router: bool = True
    """false trains the router in full, also beside LoRA."""
    watch_experts: bool = True
    """Log expert utilisation and warn of dead experts."""


class Generate(Table):
    """How text is generated, in evaluation and in chat."""

    max_new_tokens: Count = 128
    """Longest answer."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_k: CountOrZero = 0
    """0 switches it off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    repetition_penalty: Positive = 1.0
    """1 switches it off."""
    seed: CountOrZero = 0
    """Seed of sampling."""


Rung = Literal["retry", "defragment", "cut", "checkpointing", "chunk_loss", "activation_offload", "optimizer_offload"]
"""A remedy of the backoff ladder."""


class Backoff(Table):
    """What may be done when memory runs out."""

    ladder: list[Rung] = [
        "retry", "defragment", "cut", "checkpointing", "chunk_loss", "activation_offload", "optimizer_offload"
    ]
    """Remedies in the order they are tried."""
    allow_learning_changes: list[Literal["max_length"]] = []
    """Remedies that change what is learned, allowed here by name: max_length cuts the ends off the longest sequences
    when not even one fits."""
    grow: bool = True
    """Let the token budget grow again after clean steps."""


class Trackers(Table):
    """Experiment trackers beside the journal."""

    use: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Which ones; each needs its package."""
    project: str | None = None
    """Project name shown there."""
    tags: list[str] = []
    """Tags shown there."""


class Finish(Table):
    """What happens to the result."""

    merge: bool = False
    """Merge the adapter into a full model at the end."""


class Stage(Table):
    """One stage of a staged run: its own process, with any of the recipe's tables on top of the recipe's own."""

    name: Name
    """How --set addresses it: stages.NAME.train.learning_rate=1e-5."""
    kind: Literal["train", "assemble"] = "train"
    """train, or assemble experts of earlier stages into a mixture."""
    from_: str | list[str] | None = Field(None, alias="from")
    """The earlier stage, or stages, this one starts from."""
    enabled: bool = True
    """false skips it."""
    experts_per_token: Count | None = None
    """assemble: experts each token is routed to."""
    shared: list[str] = []
    """assemble: parameters taken from the first expert for all."""
    router: Literal["random", "hidden"] | None = None
    """assemble: how the router starts."""
    model: dict[str, Any] = {}
    """Keys of [model] in this stage."""
    method: dict[str, Any] = {}
    """Keys of [method] in this stage."""
    data: dict[str, Any] = {}
    """Keys of [data] in this stage."""
    train: dict[str, Any] = {}
    """Keys of [train] in this stage."""
    checkpoint: dict[str, Any] = {}
    """Keys of [checkpoint] in this stage."""
    eval: dict[str, Any] = {}
    """Keys of [eval] in this stage."""
    evaluate: dict[str, Any] = {}
    """Keys of [evaluate] in this stage."""
    moe: dict[str, Any] = {}
    """Keys of [moe] in this stage."""
    generate: dict[str, Any] = {}
    """Keys of [generate] in this stage."""
    backoff: dict[str, Any] = {}
    """Keys of [backoff] in this stage."""


class Recipe(Table):
    """A recipe file."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of this file format."""
    kind: Literal["recipe"] = "recipe"
    """Always "recipe"."""
    name: Name
    """Equals the file's stem."""
    title: str = ""
    """One line for lists."""
    notes: str = ""
    """Anything a reader should know."""
    model: Model
    method: Method = Method()
    data: Data
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    evaluate: Evaluate = Evaluate()
    moe: Moe = Moe()
    generate: Generate = Generate()
    backoff: Backoff = Backoff()
    trackers: Trackers = Trackers()
    finish: Finish = Finish()
    sweep: dict[str, list[Any]] = {}
    """Dotted key = the values to try."""
    stages: list[Stage] = []
    """Stages, in order."""
