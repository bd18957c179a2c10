"""The schema of a recipe's data: the sources of its samples, how samples become token sequences, and how a model is
scored on them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from engine.config.schema.base import Count, CountOrZero, Name, NonNegative, Positive, Table

IMAGE_FORMATS = ("image-chat", "image-preference", "image-unpaired-preference", "detection")
"""Formats of sources whose samples have images."""

PREFERENCE_FORMATS = ("preference", "image-preference")
UNPAIRED_FORMATS = ("unpaired-preference", "preference", "image-unpaired-preference", "image-preference")
"""Formats of sources from which pairs (method.objective = "dpo") and single answers (preference.loss = "kto") are
learned."""


PAIR_COLUMNS = (("prompt", "question", "query"), ("completion", "response", "answer"))
"""Names under which the columns of a prompt with a completion are recognised."""


class Source(Table):
    """One source of samples: a file, a folder of files, a hub data set, or a built-in generator."""

    beside_result = frozenset({"name"})

    name: Name
    """The name that --set uses: data.sources.NAME.enabled=false."""
    path: str | None = None
    """File, folder, glob, or "builtin:dates". Relative to the recipe's folder if the recipe was given as a path."""
    hub: str | None = None
    """Name of a data set on the hub."""
    config: str | None = None
    """Configuration of a hub data set, or of a folder that was downloaded from the hub."""
    split: str = "train"
    """Split of a hub data set or a folder, such as "train" or "train[:1000]"; for a file, only slices of train."""
    format: Literal[
        "auto", "text", "prompt-completion", "chat", "alpaca", "sharegpt", "preference", "unpaired-preference",
        "tokens", "image-chat", "image-preference", "image-unpaired-preference", "detection",
    ] = "auto"  # fmt: skip
    """How the columns are read; auto recognises the format by the column names. preference: chosen and rejected
    answers, for method.objective = "dpo"; unpaired-preference: an answer and its label, for preference.loss = "kto";
    tokens: input_ids, with labels or masks of targets. image-preference and image-unpaired-preference: preferences
    about images. detection: images with boxes."""
    template: Literal["auto", "chat", "none", "alpaca", "alpaca-chat"] = "auto"
    """Whether prompts with completions, and instructions, go through the model's chat template. auto: if it has one,
    except rows that already contain its markers; chat: all rows; none: they stay plain text. For instructions, alpaca:
    plain text with Stanford Alpaca's prompt ("Below is an instruction that describes a task ..."); alpaca-chat: that
    prompt as the user's turn."""
    unit: Annotated[str, Field(min_length=1)] | None = None
    """The unit that is one document in a text file: file (the default of .txt and .md), paragraph, line, or the text
    that ends each document, such as "<|endoftext|>". A row of a table is one document."""
    limit: Count | None = None
    """Use at most this many samples, from the start of the source."""
    enabled: bool = True
    """false: leave out this source."""
    weight: Positive = 1.0
    """How often each sample of this source is used in an epoch; fractions are sampled by seed. With data.mixing =
    "probability": the share of the samples that this source gets."""
    columns: dict[str, str] = {}
    """Tunedeck's column name = the file's column name, such as prompt = "question", or a nested one, such as completion
    = "answers.text.0". Also for keys of a turn, such as role = "speaker"."""
    roles: dict[Literal["system", "user", "assistant", "tool", "developer"], str | list[str]] = {}
    """Tunedeck's role = the file's name for it, or a list of names, such as assistant = ["agent", "bot"]."""
    image_root: str | None = None
    """Folder that image paths are relative to; by default the folder of the data file."""
    prompt: str | None = None
    """detection: the prompt for each image."""
    box_order: Literal["xyxy", "yxyx", "xywh"] | None = None
    """detection: the order of a box's four numbers in the data. There is no default, because swapped axes cannot be
    detected."""
    box_scale: Literal["unit", "pixels", "thousand"] | None = None
    """detection: the scale of a box's numbers in the data: 0 to 1, pixels of the image, or 0 to 1000."""
    box_text: Literal["qwen2", "json"] | None = None
    """detection: how boxes are written in answers; by default qwen2, with its special tokens."""


class Data(Table):
    """The data, and how it is converted into token sequences."""

    beside_result = frozenset({"workers"})

    sources: Annotated[list[Source], Field(min_length=1)]
    """Sources of training samples."""
    validation: list[Source] = []
    """Sources of validation samples, instead of valid_fraction."""
    max_length: Count = 2048
    """Longest sequence in tokens."""
    over_length: Literal["auto", "drop", "truncate", "split"] = "auto"
    """What happens to longer samples. split: plain text is split into pieces, other samples are dropped; auto:
    split."""
    overlap: CountOrZero = 0
    """Tokens that a piece of split text repeats from the piece before it, as context without loss."""
    broken: Literal["refuse", "skip"] = "refuse"
    """What happens if a line of a JSON file is not an object or has a key twice, or a record of a CSV file has more
    fields than columns or broken quotes. refuse: an error; skip: these rows are left out, counted and listed."""
    shuffle: bool = True
    """Shuffle the samples in each epoch; the order depends on seed and epoch only."""
    mixing: Literal["weights", "probability"] = "weights"
    """What the weights of sources mean. weights: how often each sample is used. probability: for each sample of an
    epoch its source is drawn in proportion to the weights, again in each epoch; an epoch has as many samples as all
    sources have, and no sample of a source is used again before all of them were used."""
    packing: bool = False
    """Pack several samples into one sequence; attention does not cross samples."""
    valid_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of the samples held out for evaluation, chosen by seed."""
    loss_on: Literal["completion", "last", "all"] = "completion"
    """completion: loss on completions and assistant turns; last: on the last assistant turn; all: on every token."""
    workers: CountOrZero | Literal["auto"] = "auto"
    """Number of processes that tokenise, and of threads that decode images; 0: no processes, and 4 threads; auto: one
    process per core if the measured rate makes that worthwhile, and 4 threads."""
    system_prompt: str | None = None
    """System prompt for conversations without a system turn."""
    template_args: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking = false."""
    image_min_pixels: Count | None = None
    """Smallest image, in pixels, for models that resize."""
    image_max_pixels: Count | None = None
    """Largest image, in pixels, for models that resize; a plan assumes an image of this size in every sequence."""


class Eval(Table):
    """Evaluation during training."""

    every_steps: Count | None = None
    """Optimizer steps between evaluations; by default once, at the end, if there is a validation set."""
    per_epoch: Count | None = None
    """Evaluations per epoch, evenly spaced; the last one is at its end."""
    at_start: bool = False
    """Also evaluate before the first step."""
    limit: Count | None = None
    """At most this many validation samples."""
    metrics: list[Literal["loss", "exact_match"]] = ["loss"]
    """exact_match generates greedily and compares with the reference."""
    samples: CountOrZero = 0
    """Number of generated samples to log at each evaluation."""
    prompts: list[str] | str = []
    """Your own prompts, answered at every evaluation, or a file of prompts: one per line, or .json or .jsonl with texts
    or rows with a prompt."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without improvement of checkpoint.best_metric."""
    early_stopping_threshold: NonNegative = 0.0
    """Smallest change of the metric that counts as an improvement."""


class Evaluate(Table):
    """Evaluation after training (`tunedeck eval`)."""

    metrics: list[Literal["loss", "exact_match", "accuracy", "token_f1", "rouge", "box_iou", "detection_rate"]] = [
        "loss"
    ]
    """Scores to compute. For generated answers: exact_match; accuracy, for labels, with precision, recall and F1 of
    each label; token_f1, the overlap of words with the reference; rouge, the overlap of word sequences; box_iou, the
    overlap of boxes with the reference; detection_rate, how often the answer has a box."""
    limit: Count | None = None
    """At most this many samples."""
    log_samples: CountOrZero = 5
    """Number of generated samples to keep."""
    sources: list[Source] = []
    """Data to score on; by default the recipe's validation set."""
    harness: list[str] = []
    """Public tasks of lm-evaluation-harness to score in addition, such as "gsm8k"."""
    harness_fewshot: CountOrZero | None = None
    """Examples before each question; by default as set by the task."""
    harness_template: Literal["auto", "on", "off"] = "auto"
    """Whether public tasks use the chat template; auto: if there is one, unless the run was trained on plain text."""
    harness_include: str | None = None
    """Folder with your own tasks (.yaml)."""


def with_sources_of_stages(recipe: Any) -> Any:
    """A recipe without `data.sources` of which every training stage names its own takes those of the first, so that
    nothing has to be written that no stage uses. `recipe` is as read, not checked yet."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("stages"), list):
        return recipe
    data, stages = recipe.get("data", {}), [stage for stage in recipe["stages"] if isinstance(stage, dict)]
    named = [_sources_of(stage) for stage in stages if stage.get("kind", "train") == "train"]
    if not isinstance(data, dict) or "sources" in data or not named or None in named:
        return recipe
    return {**recipe, "data": {**data, "sources": named[0]}}


def _sources_of(stage: dict[str, Any]) -> list[Any] | None:
    data = stage.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    return sources if isinstance(sources, list) else None
