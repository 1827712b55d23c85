"""The sections of the tree that every run has, whatever its model, environment and algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea.config.augmentations import NoisyPictures
from fovea.config.backends import BackendConfig, EmbeddedSettings, EngineConfig, TorchBackend
from fovea_gym.settings.base import (
    Fraction,
    LearningRate,
    MayChange,
    Member,
    NonNegativeInt,
    OpenUnion,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    TokenCount,
)
from fovea_gym.types import Conversion

MAX_COMPLETIONS_PER_STEP = 1 << 20
DecayRate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class Data(Section):
    """Checks and limits for rows and images when they are read."""

    on_bad_row: MayChange[Literal["error", "skip"]] = "error"
    """Action for a row that cannot become a prompt: stop, or drop, count (`data/rows_skipped`) and list it."""
    max_prompt_tokens: TokenCount = 2048
    """Longest prompt, including visual tokens; longer ones are bad rows, since prompts are never truncated."""
    max_image_mib: PositiveFloat = 32.0
    """Largest image file, and the most that is read from a URL."""
    max_image_megapixels: PositiveFloat = 64.0
    """Most pixels in an image, checked before it is decoded."""
    convert_images: tuple[Conversion, ...] = ("rotated",)
    """Conversions of images that would otherwise be refused: rotated images are turned upright by their EXIF
    orientation, cmyk becomes RGB, 16_bit channels become 8 bits, and of several frames or pages the first one is
    used."""
    image_root: str | None = None
    """Folder that relative image paths start from; default: the data file's folder. Paths that lead out of it are
    refused."""
    url_timeout_seconds: MayChange[Seconds] = 20.0
    """Time limit for one image, including redirects."""
    allow_private_addresses: bool = False
    """Allow image URLs that resolve to this machine or its private network."""
    cache_dir: MayChange[str] = "~/.cache/fovea"
    """Folder for copies of remote data files, and of Parquet files whose row groups are too large to be read one by
    one."""
    shuffle: bool = True
    """Train on rows in random order; false: in the order of the files, epoch after epoch."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Sampling weight of each question type in RL, relative to its share of the rows; default 1."""


class Rollout(Section):
    """Sampling of completions."""

    engine: EngineConfig = Field(default_factory=EmbeddedSettings)
    prompts_per_step: Annotated[int, Field(ge=1, le=1 << 17)] = 40
    """Prompts (groups) per step."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1 << 17)] = 8
    """Completions per prompt (n): the size of a group."""
    max_new_tokens: TokenCount = 512
    """Longest completion, in tokens."""
    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    """Sampling temperature, applied to every log-prob in training too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the smallest set of tokens with this much probability."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0: all."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, in addition to the model's end token."""
    stop_after_answer: bool = False
    """End a completion with the token that closes its answer, such as the last brace of the boxed one. Only graded text
    is then trained on, but the model does not learn to end its answers."""
    max_episode_tokens: PositiveInt | None = None
    """Longest episode of several turns: tokens of prompt, answers and replies. An episode ends before a turn that might
    not fit. Default: the model's number of positions."""
    augmentation: NoisyPictures | None = None
    max_staleness_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """Largest age, in steps of the policy, of the weights that sample a completion. 0: rollout and update take turns;
    1: the next step is sampled during the update; more: so are the steps after it."""

    def contradictions(self) -> Iterator[str]:
        drawn = self.prompts_per_step * self.samples_per_prompt
        if drawn > MAX_COMPLETIONS_PER_STEP:
            yield (
                f"rollout.prompts_per_step={self.prompts_per_step} times rollout.samples_per_prompt="
                f"{self.samples_per_prompt} are {drawn:,} completions a step, more than {MAX_COMPLETIONS_PER_STEP:,}, "
                "which no memory can hold; lower one of them"
            )


class Train(Section):
    """Optimizer, schedule and micro-batches."""

    backend: BackendConfig = Field(default_factory=TorchBackend)
    learning_rate: MayChange[LearningRate] = 1e-6
    """Peak learning rate of AdamW."""
    vision_tower_learning_rate: MayChange[LearningRate | None] = None
    """Peak learning rate of the vision tower's weights; default: learning_rate."""
    projector_learning_rate: MayChange[LearningRate | None] = None
    """Peak learning rate of the layers that turn the tower's output into visual tokens; default: learning_rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    adam_eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Term that AdamW adds to its denominator."""
    weight_decay: MayChange[Annotated[float, Field(ge=0, le=1000)]] = 0.0
    """Decoupled weight decay of AdamW, for all weights except norms and biases."""
    max_grad_norm: MayChange[Annotated[float, Field(ge=1e-12)]] = 1.0
    """Gradient clipping: largest global norm."""
    max_skipped_updates: MayChange[NonNegativeInt] = 3
    """Consecutive updates that may end early because a value was not finite; one more stops the run."""
    lr_warmup_steps: MayChange[NonNegativeInt] = 10
    """Steps of linear learning-rate warm-up."""
    lr_schedule: MayChange[Literal["constant", "linear", "cosine"]] = "constant"
    """Learning-rate decay from the end of the warm-up to final_lr_frac at max_steps."""
    final_lr_frac: MayChange[Fraction] = 0.0
    """Learning rate at max_steps as a share of the peak (linear and cosine)."""
    enable_dynamic_batch_size: MayChange[bool] = True
    """Fill micro-batches up to max_tokens_per_microbatch with balanced work; false: groups_per_microbatch groups."""
    max_tokens_per_microbatch: MayChange[PositiveInt] = 16_384
    """Largest packed micro-batch; attention and images count as tokens of equal cost. Larger groups are split."""
    groups_per_microbatch: MayChange[PositiveInt] = 1
    """Groups per micro-batch if enable_dynamic_batch_size is false."""
    plain_update_every_steps: MayChange[PositiveInt] = 50
    """Interval of updates that reuse no activations of the rollout and also score groups left out of the update, so
    that mismatch/* compares two independent computations of every completion."""
    gradient_checkpointing: MayChange[Literal["none", "full", "selective"]] = "none"
    """Activations of the decoder and a trained vision tower that the backward pass recomputes. full: whole layers
    (least memory, a third more time); selective: all except attention and linear layers (medium memory, little
    time)."""

    def contradictions(self) -> Iterator[str]:
        if self.groups_per_microbatch > 1 and self.enable_dynamic_batch_size:
            yield (
                f"train.groups_per_microbatch={self.groups_per_microbatch} counts groups, but "
                "train.enable_dynamic_batch_size=true fills microbatches by tokens; set "
                "train.enable_dynamic_batch_size=false, or train.groups_per_microbatch=1"
            )


class Warmup(Section):
    """Supervised fine-tuning before RL, for a model that starts from random weights."""

    max_steps: PositiveInt = 800
    """Largest number of optimizer steps."""
    batch_size: Annotated[int, Field(ge=1, le=1 << 17)] = 32
    """Prompt-answer pairs per step."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 20
    """Steps of linear learning-rate warm-up."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Sampling weight of each question type, relative to its share of the rows; default 1."""
    check_every_steps: PositiveInt = 25
    """Interval of dev evaluations for early stopping."""
    stop_accuracy: Fraction = 1.0
    """Dev accuracy at which the warm-up stops early."""
    stop_kind_accuracy: dict[str, Fraction] = Field(default_factory=dict)
    """Dev accuracy that these question types must also reach before the warm-up stops early."""


class Evaluate(Section):
    """Accuracy on held-out rows, of greedy and, if set, also of sampled answers."""

    every_steps: NonNegativeInt = 0
    """Interval of dev evaluations during training; 0: never."""
    dev_size: PositiveInt = 200
    """Number of dev rows in one evaluation."""
    test_size: PositiveInt | None = None
    """Number of test rows in one evaluation; default: all."""
    before_training: bool = True
    """Evaluate on the test rows before the first step, and after a warm-up, for comparison with the end."""
    after_max_hours: bool = False
    """Also evaluate on the test rows and write the report when max_hours ends the run; this takes extra time."""
    shared_images: Literal["ignore", "count", "forbid"] = "count"
    """Action for test images that are also in the training split: nothing, count them, or stop before training."""
    shared_images_rows: PositiveInt | None = 10_000
    """Number of rows per split, a fixed sample, that are searched for shared images; null: all, which may take long."""
    image_controls: bool = True
    """Image ablation: also answer with a shuffled and a blank image, for the accuracy of the text by itself."""
    samples_per_prompt: Annotated[int, Field(ge=0, le=1 << 17)] = 0
    """Sampled answers per row in `fovea eval`, for pass@k and majority vote; 0: none."""
    dev_samples_per_prompt: Annotated[int, Field(ge=0, le=1 << 17)] = 0
    """Sampled answers per row in every dev evaluation during training, in addition to the greedy one; 0: none."""
    temperature: Annotated[float, Field(ge=1e-6)] | None = None
    """Temperature of sampled answers; default: rollout.temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling of sampled answers; default: rollout.top_p."""
    image_type_key: str | None = None
    """Column with the image type, by which accuracies are broken down."""


class Parity(Section):
    """Check at the start of a run that engine and trainer compute the same log-probs for the same completions."""

    prompts: Annotated[int, Field(ge=0, le=10_000)] = 4
    """Number of training prompts whose completions are sampled and scored again, with and without their images; two of
    them after each weight sync to an engine with a copy of the weights. 0: no check."""
    max_abs_logprob_diff: PositiveFloat = 0.1
    """Largest mean absolute difference; above it, with or without images, the run stops. It also stops if k3 (an
    estimate of the KL divergence per token) is over 4 times that of a uniform difference of this size, since a few
    tokens are then far off.

    With images the mean may be 4 times that without, plus a thousandth of this limit in float32 and a tenth in
    bfloat16, or more if every known fault moves the log-probs 3 times as much."""


class Checkpoint(Section):
    """Checkpoints, from which a run resumes bit for bit."""

    every_steps: NonNegativeInt = 100
    """Interval of checkpoints; 0: only before the first step and at the end."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep; older ones are deleted, except the last one before a series of skipped updates."""
    keep_best: bool = False
    """Save at the best dev accuracy so far (evaluate.every_steps), and keep that checkpoint as well."""
    background: bool = True
    """Continue with the next step while a checkpoint is written from a copy in host memory."""


class TrackerSettings(Member):
    """Settings of an experiment tracker from another package."""


class Log(Section):
    """Outputs of a run in addition to its metrics."""

    samples_every_steps: PositiveInt = 50
    """Interval of steps at which prompts, images and answers of four groups are kept for report and `fovea view`."""
    tensorboard: bool = True
    """Write tensorboard/ in the run folder."""
    wandb_project: str | None = None
    """Weights & Biases project to log to (extra: wandb); WANDB_MODE=offline keeps it on this machine."""
    mlflow_experiment: str | None = None
    """MLflow experiment to log to (extra: mlflow), at MLFLOW_TRACKING_URI, by default mlflow.db in this folder."""
    swanlab_project: str | None = None
    """SwanLab project to log to (extra: swanlab); SWANLAB_MODE=offline keeps it on this machine."""
    tracker: Annotated[TrackerSettings | None, OpenUnion("fovea.trackers", "connect")] = None
    """Tracker from another package to log to (docs/extending.md)."""
    progress: bool = True
    """Live display in the terminal."""
    peak_tflops: PositiveFloat | None = None
    """Peak FLOP rate of one GPU, for `mfu`; default: the data sheet's dense bfloat16 rate of known GPUs."""


class Cluster(Section):
    """Worker processes of a run, one per GPU; on CPUs, a GPU means one process (docs/several_processes.md)."""

    num_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of machines in the Ray cluster whose GPUs the run uses."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs on each machine; Ray starts a worker for each. Default: one process, or those that torchrun started."""
    wait_minutes: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Time that a run waits for free GPUs of a Ray cluster (nodes may be joining or busy with other runs); 0: none."""
    placement: Literal["collocated", "disaggregated", "hybrid"] = "collocated"
    """Use of the GPUs. collocated: each trains and generates in turn; disaggregated: rollout_gpus of them generate and
    the others train; hybrid: rollout_gpus of them generate and the others do both in turn."""
    rollout_gpus: NonNegativeInt = 0
    """GPUs that only generate; for disaggregated and hybrid."""

    heartbeat_timeout_seconds: Seconds = 60.0
    """Silence after which a worker process counts as hung: it is killed, and the run ends (docs/faults.md)."""
    collective_timeout_seconds: Seconds = 1800.0
    """Longest time that a rank waits for the others in a collective call; then the run ends."""

    @property
    def num_ray_workers(self) -> int:
        """Workers that Ray starts; 0: none."""
        return 0 if self.gpus_per_node is None else self.num_nodes * self.gpus_per_node

    def contradictions(self) -> Iterator[str]:
        if self.num_nodes > 1 and self.gpus_per_node is None:
            yield (
                f"cluster.num_nodes={self.num_nodes} needs Ray, which starts as many workers per machine as "
                "cluster.gpus_per_node says; set it"
            )
        if self.placement == "collocated" and self.rollout_gpus:
            yield (
                f"cluster.rollout_gpus={self.rollout_gpus} sets GPUs apart to generate, but with "
                "cluster.placement=collocated every GPU also trains; set cluster.placement=disaggregated or hybrid, "
                "or leave rollout_gpus out"
            )
        if self.placement != "collocated" and not self.rollout_gpus:
            yield (
                f"cluster.placement={self.placement} needs GPUs that only generate; set cluster.rollout_gpus to their "
                "number"
            )
        workers = self.num_ray_workers
        if 0 < workers <= self.rollout_gpus:
            yield (
                f"cluster.rollout_gpus={self.rollout_gpus} leaves no GPU of {workers} for training; lower it, or raise "
                "cluster.gpus_per_node or cluster.num_nodes"
            )


GpuName: TypeAlias = Literal[
    "cpu", "a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", "rtx3090", "a10", "l4"
]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Plan(Section):
    """Assumptions of `fovea plan`; a run does not read them."""

    gpus: PositiveInt | None = None
    """GPUs of the run, one process on each; default: those of `cluster`, else 1."""
    gpu: GpuName | None = None
    """Kind of GPU; default: that of this machine, or cpu without a GPU."""
    prompt_tokens: PositiveInt | None = None
    """Length of a prompt, including visual tokens; default: the longest, data.max_prompt_tokens."""
    completion_tokens: PositiveInt | None = None
    """Length of a completion; default: the longest, rollout.max_new_tokens."""
    images_per_prompt: Annotated[int, Field(ge=0)] = 1
    """Number of images in a prompt."""
    image_tokens: PositiveInt | None = None
    """Visual tokens of an image; default: those of model.max_pixels, or as many as fit into a prompt."""
    distinct_images: PositiveInt | None = None
    """Number of different training images, whose features are cached with a frozen tower; default: as many as fit."""
