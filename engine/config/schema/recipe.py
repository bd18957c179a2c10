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
    """How rotary positions are scaled, so that a model reads sequences longer than it was made for. Written into the
    config of the result."""

    type: Literal["yarn", "linear", "dynamic"]
    """yarn: slow rotations are stretched, fast ones kept (arXiv:2309.00071). linear: every position is divided by
    factor. dynamic: the base of the rotations grows with the length (NTK); every sequence of a run gets the rotations
    for data.max_length, because those for the longest of a micro-batch would change with the micro-batch."""
    factor: Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
    """How many times longer sequences may be than the model's own positions."""
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
    """Tokens whose rows of embedding and head are trained, the only ones with LoRA; those missing are added."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the base weights. auto: bfloat16 where the device has it, else float16 on CUDA, float32 on a CPU."""
    attention: AttentionChoice = "auto"
    """Attention kernel. flash: the best flash attention that is installed and runs on the GPU; auto: that where there
    is one, else sdpa, else eager. The other values name one kernel: varlen is torch's own flash attention."""
    attention_dropout: Literal["auto", "keep", "off"] = "auto"
    """What becomes of the attention dropout in the model's config. auto: kept in eager attention, with masks keyed by
    (seed, step, sample, module); switched off with a warning in other kernels, whose masks would change with the
    micro-batch. keep: also kept in sdpa and flash_attention_2 on CUDA, where an out-of-memory error or another
    micro-batch then changes what is learned. off: switched off."""
    kernels: Literal["auto", "torch"] = "auto"
    """auto: Liger's norms, gated blocks, rotary embedding on CUDA, if installed; torch: the model's own operations."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4 stores the frozen base in 4 bits (bitsandbytes, CUDA only)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: random weights of the model's real shapes, without a download, for rehearsals."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary positions, for data.max_length beyond the model's."""


class Method(Table):
    """Which weights are trained."""

    kind: Literal["lora", "full"] = "lora"
    """lora: low-rank adapters beside a frozen base; full: the weights themselves."""
    objective: Literal["sft", "dpo"] = "sft"
    """sft: the answers of the data are imitated (supervised fine-tuning). dpo: of two answers to a prompt the chosen
    one becomes likelier than the rejected one, as [preference] says; train.batch_size then counts pairs."""
    rank: Count = 16
    """LoRA rank."""
    alpha: Positive | None = None
    """The update is scaled by alpha/rank (alpha/sqrt(rank) with rslora). By default twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """LoRA dropout; masks are keyed by (seed, step, sample, module), whatever the split."""
    targets: Literal["all-linear", "attention"] | list[str] = "all-linear"
    """Modules that get adapters: every linear layer but the head, the attention projections, or globs on names."""
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
    """With kind = "full": only these parameters are trained (globs on dotted names)."""
    freeze: list[str] = []
    """With kind = "full": parameters that are not trained (globs on dotted names)."""

    @property
    def effective_alpha(self) -> float:
        """The alpha of LoRA: the recipe's, or twice the rank if the recipe sets none."""
        return float(self.alpha if self.alpha is not None else 2 * self.rank)


class ParameterGroup(Table):
    """Parameters with a learning rate or weight decay of their own."""

    match: str
    """Glob on dotted parameter names; "**" crosses dots."""
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
    5e-6 and 1e-6. Each stage has the default of its own method."""
    min_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the schedule."""
    scheduler: Literal["cosine", "linear", "constant", "cosine_with_restarts", "polynomial", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up. wsd (warm-up, stable, decay): the peak rate until the last steps, which
    decay_ratio and decay_shape describe; its warm-up begins at min_learning_rate."""
    restarts: Count = 1
    """Cycles of cosine_with_restarts."""
    power: Positive = 1.0
    """Exponent of polynomial; 1 is linear."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the steps in which wsd decays, at the end; by default 0.1."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] | None = None
    """How wsd decays; by default cosine. 1-sqrt: one minus the square root of the progress."""
    warmup_ratio: Fraction | None = None
    """Share of the steps spent warming up."""
    warmup_steps: CountOrZero | None = None
    """Steps spent warming up; shortened where the run is shorter."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """adamw is torch's fused one; adamw_8bit needs bitsandbytes on CUDA. adafactor is torch's: an update is
    learning_rate, at most 1/sqrt(step), times the root mean square of the weight. The Hugging Face Trainer's adafactor
    does not scale learning_rate, so a rate chosen for it learns far slower here."""
    rounding: Literal["exact", "stochastic", "nearest"] = "exact"
    """How updates of weights that are trained in bf16 are rounded. bf16 has 8 bits: an update below 1/512 of a weight
    is lost when it is rounded to nearest. exact: the 16 bits that rounding drops are kept beside each weight; together
    they are the fp32 weight. stochastic: rounded up or down by chance, right on average, without additional bytes.
    nearest: rounded to the nearest. Weights that are trained in float32 or float16 are not affected."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the state of adamw, and of sgd's momentum, for weights that are trained in bf16; other weights have
    state of their own dtype. bfloat16 is rounded stochastically, or to nearest with rounding = "nearest", which then
    is torch's own optimizer on bf16 weights."""
    optimizer_offload: bool = False
    """Keep optimizer state in host memory."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices; biases and norms are left out."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay rates of Adam's two averages."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm here; 0 does not clip."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the target probability that is spread over the vocabulary."""
    seed: CountOrZero = 0
    """Seed of sample order, initial weights, dropout and generated data."""
    gradient_checkpointing: Literal["auto"] | bool | Count = "auto"
    """Recompute activations in the backward pass instead of keeping them: of all layers, of none, or of so many, the
    first ones. auto: of as few as the memory needs, by the plan."""
    mlp_tiles: Count = 1
    """Tiled MLP: compute feed-forward blocks in so many pieces of each sequence, and each piece again in the backward
    pass. Saves memory with long sequences; the results are the same."""
    activation_offload: bool = False
    """Keep saved activations in host memory."""
    loss: Literal["auto", "plain", "chunked", "fused"] = "auto"
    """How the loss is computed; auto never holds a tensor of tokens x vocabulary."""
    compile: bool = False
    """torch.compile the decoder layers in training. They are compiled before the first step, and used if they then
    equal the layers as they are: the proof compile, which says how long it took."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower: bit-for-bit resume on CUDA. A run that needs a kernel without a
    deterministic version is refused, with its name."""
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
    """Checkpoints in each epoch, at equal distances; the last is at its end."""
    every_minutes: NonNegative = 30.0
    """Minutes between checkpoints; 0: none by time."""
    keep: Count = 2
    """Number of newest checkpoints to keep; the best one is kept in addition."""
    best_metric: str = "loss"
    """Metric that decides the best checkpoint: lowest for loss and perplexity, highest for all others. With several
    validation sources also the metric of one, such as "NAME/loss"."""
    result: Literal["best", "last"] = "last"
    """Which weights become the result."""


class Moe(Table):
    """Settings for mixture-of-experts models."""

    freeze_router: bool | None = None
    """true: the router is not trained; false: it is trained in full, also beside LoRA. By default true beside LoRA,
    false in full fine-tuning."""
    aux_loss_weight: NonNegative | None = None
    """Weight of the auxiliary loss that balances the experts, computed per sequence and layer over the whole step. By
    default the model's router_aux_loss_coef if the router is trained, else 0."""
    watch_experts: bool = True
    """Count each expert's tokens: in step events, in experts/ at evaluations, with warnings where it has few."""


class Generate(Table):
    """How text is generated, in evaluation and in chat."""

    max_new_tokens: Count = 128
    """Longest answer."""
    temperature: NonNegative = 0.0
    """0 is greedy: the likeliest token each time."""
    top_k: CountOrZero = 0
    """0 switches it off."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    repetition_penalty: Positive = 1.0
    """1 switches it off."""
    seed: CountOrZero = 0
    """Seed of sampling."""


Rung = Literal[
    "retry", "defragment", "cut", "checkpointing", "chunk_loss", "tile_mlp", "activation_offload", "optimizer_offload"
]
"""A remedy of the backoff ladder."""


class Backoff(Table):
    """Remedies for out-of-memory errors."""

    ladder: list[Rung] = [
        "retry", "defragment", "cut", "checkpointing", "chunk_loss", "tile_mlp", "activation_offload",
        "optimizer_offload",
    ]  # fmt: skip
    """Remedies in the order in which they are tried."""
    allow_learning_changes: list[Literal["max_length"]] = []
    """Remedies that change what is learned, allowed by name: max_length truncates the longest sequences when not even
    one of them fits."""
    grow: bool = True
    """Let the micro-batch budget grow again after steps without an out-of-memory error."""


class RecipeParallel(Table):
    """How several devices share a run of this recipe. Keys that are given here replace the profile's; with one device
    none of them counts."""

    strategy: Literal["auto", "single", "replicated", "sharded"] | None = None
    """A single device, replicated weights, or sharded weights (FSDP2); auto: replicated where the model fits each
    device, else sharded. By default the profile's."""
    shard: Literal["gradients", "parameters"] | None = None
    """What "sharded" spreads over the devices: gradients and optimizer state (ZeRO-2), or parameters too (ZeRO-3). By
    default the profile's."""
    sequence: Literal["auto"] | Count | None = None
    """How many devices share one sequence; auto: the fewest with which the longest sequence fits. By default the
    profile's."""


class Stage(Table):
    """One stage of a staged run: a process of its own, with its own values of any of the recipe's tables."""

    name: Name
    """The name that --set uses: stages.NAME.train.learning_rate=1e-5."""
    kind: Literal["train", "assemble"] = "train"
    """train, or assemble experts of earlier stages into a mixture."""
    from_: str | list[str] | None = Field(None, alias="from")
    """train: the earlier stage to start from, instead of [model]. assemble: two or more earlier stages, one for each
    expert; "base" is the recipe's own [model], and a name may be repeated."""
    enabled: bool = True
    """false: leave this stage out."""
    experts_per_token: Count | None = None
    """assemble: experts each token is routed to; by default 2."""
    shared: list[str] = []
    """assemble: globs on parameters taken from the first expert where the experts differ; others are averaged."""
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

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this file format."""
    kind: Literal["recipe"] = "recipe"
    """Always "recipe"."""
    name: Name = ""
    """Name of the recipe. May be left out, because the file's name without .toml counts."""
    title: str = ""
    """One line of description, for lists."""
    notes: str = ""
    """Anything a reader should know."""
    profile: Name | None = None
    """The hardware profile that the recipe is meant for; `recipes list` shows whether it fits there. Any other may be
    chosen."""
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
    """Dotted key = the values to try."""
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
