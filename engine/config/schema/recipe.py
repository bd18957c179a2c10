"""The schema of a recipe: what is trained, how, on what data, and what becomes of the result.

Defaults are defined here (those of [data], [eval] and [evaluate] in `engine.config.schema.data`) and nowhere else;
docstrings become the JSON Schema's descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.config.attention import AttentionChoice
from engine.config.schema.base import Count, CountOrZero, Fraction, Name, NonNegative, Positive, Table
from engine.config.schema.data import Data, Eval, Evaluate, with_sources_of_stages
from engine.config.schema.finish import Finish, Trackers
from engine.config.schema.preference import LEARNING_RATES, Preference


class RopeScaling(Table):
    """Scaling of rotary positions for sequences longer than the model's maximum. Written into the config of the
    result."""

    type: Literal["yarn", "linear", "dynamic"]
    """yarn: slow rotations are stretched, fast ones kept (arXiv:2309.00071). linear: every position is divided by
    factor. dynamic: the base of the rotations grows with the length (NTK); every sequence of a run uses the rotations
    for data.max_length, so that training does not depend on the micro-batch."""
    factor: Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
    """Factor by which sequences may be longer than the model's maximum."""
    original_max_position_embeddings: Count | None = None
    """With yarn: the positions that factor multiplies; by default the config's max_position_embeddings."""


class Model(Table):
    """The model to start from."""

    id: str
    """Hub id, folder, "builtin:tiny", "run:RUN[@STEP|@best]" to start from an earlier run, or in a stage
    "stage:NAME[@STEP|@best]" to start from an earlier stage."""
    tokenizer: str | None = None
    """Hub id, folder or "builtin:bytes"; by default the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    adapter: str | None = None
    """A LoRA adapter to continue: hub id, folder, "run:RUN[@STEP|@best]", or in a stage "stage:NAME[@STEP|@best]"."""
    chat_template: str | None = None
    """A chat template used instead of the tokenizer's: "chatml", "llama3", "gemma", "phi3", "mistral" or "plain", where
    the vocabulary has its tokens (plain needs none); else Jinja text, or a path ending in .jinja."""
    add_tokens: list[str] = []
    """Tokens to train in embedding and head; missing ones are added. With LoRA, only the rows of these tokens are
    trained."""
    special_tokens: dict[Literal["bos", "eos", "unk"], str] = {}
    """Tokens of the vocabulary, or of add_tokens, that replace the tokenizer's special tokens, such as
    eos = "<|im_end|>": eos ends documents and answers, bos begins them, unk replaces unknown text."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the base weights. auto: bfloat16 if the device supports it, else float16 on CUDA, float32 on a CPU."""
    attention: AttentionChoice = "auto"
    """Attention kernel. flash: the best flash attention that is installed and runs on the GPU; auto: that if available,
    else sdpa, else eager. Other values select one kernel: varlen is torch's own flash attention."""
    attention_dropout: Literal["auto", "keep", "off"] = "auto"
    """How to handle attention dropout in the model's config. auto: kept in eager attention, with masks keyed by (seed,
    step, sample, module); disabled with a warning in other kernels, whose masks would depend on the micro-batch. keep:
    also kept in sdpa and flash_attention_2 on CUDA, where an out-of-memory error or a different micro-batch then
    changes the training result. off: disabled."""
    kernels: Literal["auto", "torch"] = "auto"
    """auto: Liger's norms, gated blocks and rotary embedding on CUDA, if installed; torch: the model's own
    operations."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4 stores the frozen base in 4 bits (bitsandbytes, CUDA only)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: random weights with the model's shapes, without a download, for rehearsals."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary positions, for data.max_length beyond the model's."""


class Method(Table):
    """Which weights are trained."""

    kind: Literal["lora", "full"] = "lora"
    """lora: low-rank adapters on a frozen base; full: all weights."""
    objective: Literal["sft", "dpo"] = "sft"
    """sft: supervised fine-tuning on the answers in the data. dpo: preference training, where the chosen of two answers
    becomes likelier than the rejected one, with the loss set in [preference]; train.batch_size then counts pairs."""
    rank: Count = 16
    """LoRA rank."""
    alpha: Positive | None = None
    """The update is scaled by alpha/rank (alpha/sqrt(rank) with rslora). By default twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """LoRA dropout; masks are keyed by (seed, step, sample, module), independent of the micro-batch."""
    targets: Literal["all-linear", "attention"] | list[str] = "all-linear"
    """Modules that get adapters: all linear layers except the head, the attention projections, or globs for module
    names."""
    exclude: list[str] = []
    """Globs for module names that get no adapter."""
    layers: list[CountOrZero] = []
    """Numbers of the layers that get adapters, from 0; by default all layers."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    adapter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the adapters."""
    also_train: list[str] = []
    """With LoRA: parameters that are also trained, in full (globs for dotted names; "**" also matches dots)."""
    train_only: list[str] = []
    """With kind = "full": only these parameters are trained (globs for dotted names)."""
    freeze: list[str] = []
    """Parameters that are not trained (globs for dotted names), or parts of the model: "vision", "projector" (what
    connects the vision encoder to the language model), "language". With LoRA, these modules get no adapter, and those
    of also_train are not trained."""

    @property
    def effective_alpha(self) -> float:
        """The alpha of LoRA: the recipe's, or twice the rank if the recipe sets none."""
        return float(self.alpha if self.alpha is not None else 2 * self.rank)


class ParameterGroup(Table):
    """Parameters with a separate learning rate or weight decay."""

    match: str
    """Glob for dotted parameter names; "**" also matches dots."""
    learning_rate: Positive | None = None
    """Peak learning rate of these parameters."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters."""


class Train(Table):
    """The optimisation."""

    epochs: Positive | None = None
    """Passes over the data; by default 1 without max_steps. The run ends when epochs or max_steps is reached."""
    max_steps: Count | None = None
    """Number of optimizer steps."""
    batch_size: Count = 16
    """Sequences per optimizer step over all devices, with method.objective = "dpo" pairs: the effective batch size."""
    micro_batch: Literal["auto"] | Count = "auto"
    """Sequences of the longest length per forward pass at the start; auto: as many as the plan predicts to fit."""
    learning_rate: Positive | None = None
    """Peak learning rate. By default 2e-4 with method.kind = "lora", 2e-5 with "full"; with method.objective = "dpo"
    5e-6 and 1e-6. Each stage uses the default for its method."""
    min_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the schedule."""
    scheduler: Literal["cosine", "linear", "constant", "cosine_with_restarts", "polynomial", "wsd"] = "cosine"
    """Learning rate schedule after warm-up. wsd (warm-up, stable, decay): the peak rate until the final decay, which
    decay_ratio and decay_shape set; its warm-up begins at min_learning_rate."""
    restarts: Count = 1
    """Cycles of cosine_with_restarts."""
    power: Positive = 1.0
    """Exponent of polynomial; 1 is linear."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Fraction of the steps, at the end, in which wsd decays; by default 0.1."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] | None = None
    """How wsd decays; by default cosine. 1-sqrt: one minus the square root of the progress."""
    warmup_ratio: Fraction | None = None
    """Fraction of the steps used for warm-up."""
    warmup_steps: CountOrZero | None = None
    """Warm-up steps; shortened if the run is shorter."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """adamw is torch's fused AdamW; adamw_8bit needs bitsandbytes on CUDA. adafactor is torch's: an update is
    learning_rate (at most 1/sqrt(step)) times the root mean square of the weight. The Hugging Face Trainer's adafactor
    does not scale learning_rate, so a rate chosen for it trains far more slowly here."""
    rounding: Literal["exact", "stochastic", "nearest"] = "exact"
    """How updates of bf16 weights are rounded. bf16 has 8 significant bits, so an update below 1/512 of a weight is
    lost when it is rounded to nearest. exact: the 16 bits that rounding drops are kept in addition to each weight;
    together they form the fp32 weight. stochastic: rounded up or down at random, exact on average, without additional
    memory. nearest: rounded to nearest. Weights trained in float32 or float16 are not affected."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the state of adamw, and of sgd's momentum, for weights trained in bf16; the state of other weights has
    their dtype. bfloat16 is rounded stochastically, or to nearest with rounding = "nearest", which equals torch's
    optimizer on bf16 weights."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay for matrices; biases and norms are excluded."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of Adam's two averages."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this value; 0: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of the target probability that is spread over the vocabulary."""
    seed: CountOrZero = 0
    """Seed of sample order, initial weights, dropout and generated data."""
    gradient_checkpointing: Literal["auto"] | bool | Count = "auto"
    """Recompute activations in the backward pass instead of keeping them: in all layers, in none, or in the first N
    layers. auto: in as few layers as the plan needs to fit."""
    mlp_tiles: Count = 1
    """Tiled MLP: compute feed-forward blocks in this many pieces of each sequence, and recompute each piece in the
    backward pass. Saves memory with long sequences; the results are the same."""
    activation_offload: bool = False
    """Keep saved activations in host memory."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How the loss is computed; auto never allocates a tensor of tokens x vocabulary."""
    compile: bool = False
    """Use torch.compile for the decoder layers in training. They are compiled before the first step, and used if they
    give the same results as the uncompiled layers (the check compile, which also reports the time)."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower but allow bit-for-bit resume on CUDA. If a kernel has no
    deterministic version, the run ends with an error that names it."""
    log_every_steps: Count = 1
    """Optimizer steps between two step events."""
    groups: list[ParameterGroup] = []
    """Parameters with a learning rate or weight decay of their own; the first match counts."""

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, which every recipe without stages and sweep has."""
        assert self.learning_rate is not None
        return self.learning_rate


class Checkpoint(Table):
    """Checkpoints, and which weights become the result."""

    every_steps: Count | None = None
    """Optimizer steps between checkpoints."""
    per_epoch: Count | None = None
    """Checkpoints per epoch, evenly spaced; the last one is at its end."""
    every_minutes: NonNegative = 30.0
    """Minutes between checkpoints; 0: no checkpoints by time."""
    keep: Count = 2
    """Number of newest checkpoints to keep, in addition to the best ones."""
    keep_best: Count = 1
    """Number of best checkpoints to keep, by best_metric at the evaluations. A checkpoint is saved at each of them."""
    best_metric: str = "loss"
    """Metric that decides the best checkpoint: lowest for loss and perplexity, highest for all others. With several
    validation sources, also the metric of one of them, such as "NAME/loss"."""
    result: Literal["best", "last"] = "last"
    """Which weights become the result."""


class Moe(Table):
    """Settings for mixture-of-experts models."""

    freeze_router: bool | None = None
    """true: the router is not trained; false: it is trained in full, also with LoRA. By default true with LoRA, false
    in full fine-tuning."""
    aux_loss_weight: NonNegative | None = None
    """Weight of the auxiliary loss that balances the experts, computed per sequence and layer over the whole step. By
    default the model's router_aux_loss_coef if the router is trained, else 0."""
    watch_experts: bool = True
    """Count the tokens of each expert: in step events, in experts/ at evaluations, and with a warning for experts with
    few tokens."""


class Generate(Table):
    """How text is generated, in evaluation and in chat."""

    max_new_tokens: Count = 128
    """Longest answer."""
    temperature: NonNegative = 0.0
    """0 is greedy: always the likeliest token."""
    top_k: CountOrZero = 0
    """0 disables it."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    repetition_penalty: Positive = 1.0
    """1 disables it."""
    seed: CountOrZero = 0
    """Seed of sampling."""


Rung = Literal[
    "retry", "defragment", "cut", "checkpointing", "chunk_loss", "tile_mlp", "activation_offload", "optimizer_offload"
]
"""A remedy of the backoff ladder."""


class Backoff(Table):
    """Remedies for out-of-memory errors."""

    beside_result = frozenset({"ladder", "allow_learning_changes", "grow"})

    ladder: list[Rung] = [
        "retry", "defragment", "cut", "checkpointing", "chunk_loss", "tile_mlp", "activation_offload",
        "optimizer_offload",
    ]  # fmt: skip
    """Remedies in the order in which they are tried."""
    allow_learning_changes: list[Literal["max_length"]] = []
    """Allowed remedies that change the training result: max_length truncates the longest sequences if a single one does
    not fit."""
    grow: bool = True
    """Let the micro-batch budget grow again after steps without an out-of-memory error."""


class RecipeParallel(Table):
    """How several devices share a run of this recipe. Keys set here replace those of the profile; with one device they
    have no effect."""

    strategy: Literal["auto", "single", "replicated", "sharded"] | None = None
    """A single device, replicated weights, or sharded weights (FSDP2); auto: replicated if the model fits each device,
    else sharded. By default the profile's."""
    shard: Literal["gradients", "parameters"] | None = None
    """What "sharded" distributes over the devices: gradients and optimizer state (ZeRO-2), or parameters as well
    (ZeRO-3). By default the profile's."""
    sequence: Literal["auto"] | Count | None = None
    """Number of devices that share one sequence; auto: the smallest number with which the longest sequence fits. By
    default the profile's."""


class Stage(Table):
    """One stage of a staged run: a separate process, with its own values for any table of the recipe."""

    name: Name
    """The name that --set uses: stages.NAME.train.learning_rate=1e-5."""
    kind: Literal["train", "assemble"] = "train"
    """train, or assemble experts of earlier stages into a mixture of experts."""
    from_: str | list[str] | None = Field(None, alias="from")
    """train: the earlier stage to start from, instead of [model]. assemble: two or more earlier stages, one for each
    expert; "base" is the recipe's own [model], and a name may be repeated."""
    enabled: bool = True
    """false: leave this stage out."""
    experts_per_token: Count | None = None
    """assemble: experts each token is routed to; by default 2."""
    shared: list[str] = []
    """assemble: globs for parameters to take from the first expert where the experts differ; others are averaged."""
    router: Literal["random", "hidden"] | None = None
    """assemble: initial router weights. random (the default), or hidden: the direction of each expert's own data in
    the hidden states of the recipe's model."""
    model: dict[str, Any] = {}
    """Keys of [model] in this stage."""
    method: dict[str, Any] = {}
    """Keys of [method] in this stage."""
    preference: dict[str, Any] = {}
    """Keys of [preference] in this stage."""
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
    finish: dict[str, Any] = {}
    """Keys of [finish] in this stage."""


class Recipe(Table):
    """A recipe file."""

    beside_result = frozenset({"title", "notes", "profile"})

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this file format."""
    kind: Literal["recipe"] = "recipe"
    """Always "recipe"."""
    name: Name = ""
    """Name of the recipe. Optional: the name is that of the file without .toml."""
    title: str = ""
    """One line of description, for lists."""
    notes: str = ""
    """Anything a reader should know."""
    profile: Name | None = None
    """The hardware profile that the recipe is made for; `recipes list` shows whether it fits there. Any other profile
    can be used."""
    model: Model
    method: Method = Method()
    preference: Preference = Preference()
    data: Data
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    evaluate: Evaluate = Evaluate()
    moe: Moe = Moe()
    generate: Generate = Generate()
    backoff: Backoff = Backoff()
    parallel: RecipeParallel = RecipeParallel()
    trackers: Trackers = Trackers()
    finish: Finish = Finish()
    sweep: dict[str, list[Any]] = {}
    """Dotted key = list of values to try."""
    stages: list[Stage] = []
    """Stages, in order."""

    _take_sources = model_validator(mode="before")(with_sources_of_stages)

    @model_validator(mode="after")
    def _choose_learning_rate(self) -> Recipe:
        """Fill in the method's default, unless stages or points of a sweep may have another method."""
        if self.train.learning_rate is None and not self.stages and not self.sweep:
            chosen = self.train.model_copy(
                update={"learning_rate": LEARNING_RATES[self.method.objective, self.method.kind]}
            )
            object.__setattr__(self, "train", chosen)  # the table is frozen, and not handed on before this returns
        return self

    @property
    def learns_preferences(self) -> bool:
        return self.method.objective == "dpo"

    @property
    def learns_pairs(self) -> bool:
        """Whether samples are pairs of a chosen and a rejected sequence."""
        return self.learns_preferences and self.preference.in_pairs

    @property
    def sequences_per_step(self) -> int:
        """Over all devices."""
        return self.train.batch_size * self.sequences_per_sample

    @property
    def sequences_per_sample(self) -> int:
        return 2 if self.learns_pairs else 1

    @property
    def freezes_router(self) -> bool:
        """Whether the routers of a mixture of experts are not trained."""
        chosen = self.moe.freeze_router
        return self.method.kind == "lora" if chosen is None else chosen
