"""The one tree of settings: typed, strict, units in names. Imports no torch, so that it loads in a blink.

Precedence: the defaults below < recipe files, left to right < `key.sub=value` on the command line
(`fovea.config.loading`). A setting is stored once; nothing writes to the tree after it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from fovea.config.algorithm import Algorithm
from fovea.config.algorithm_parts import KlInReward
from fovea.config.backends import BackendConfig, EmbeddedEngine, EngineConfig, TorchBackend
from fovea.config.base import (
    Fraction,
    MayChange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    refuse,
)
from fovea.config.curriculum import Curriculum, GeoSpotEnvironment
from fovea.config.environments import (
    CaptionEnvironment,
    FileEnvironment,
    Geo3kEnvironment,
    Judge,
    OwnEnvironment,
    PartEnvironment,
    RewardModel,
    ShapesEnvironment,
    ShapesZoomEnvironment,
    VqaEnvironment,
)
from fovea.config.mixture import EnvironmentConfig, MixtureEnvironment
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.model_reward import ModelReward, SecondOpinion
from fovea.config.splits import SplitFiles

# part of the tree, from files of their own
__all__ = [
    "Algorithm",
    "CaptionEnvironment",
    "Curriculum",
    "EnvironmentConfig",
    "FileEnvironment",
    "Geo3kEnvironment",
    "GeoSpotEnvironment",
    "Judge",
    "Lora",
    "MixtureEnvironment",
    "Model",
    "OwnEnvironment",
    "PartEnvironment",
    "RewardModel",
    "Section",
    "ShapesEnvironment",
    "ShapesZoomEnvironment",
    "TinyModel",
    "VqaEnvironment",
]

NAME, TIME = "{name}", "{time}"
"""What is filled in in `run_dir`."""
Conversion: TypeAlias = Literal["cmyk", "16_bit", "frames", "rotated"]


class Data(Section):
    """Checks and limits of rows and images as they are read."""

    on_bad_row: MayChange[Literal["error", "skip"]] = "error"
    """Handling of a row that cannot become a prompt: stop, or drop it, count it (`data/rows_skipped`) and list it."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, visual tokens counted; longer ones are bad rows, and nothing is ever cut."""
    max_image_mib: PositiveFloat = 32.0
    """Largest image file, and most that is read from a URL."""
    max_image_megapixels: PositiveFloat = 64.0
    """Most pixels of an image, checked before it is decoded."""
    convert_images: tuple[Conversion, ...] = ()
    """Conversions of images that are refused otherwise: cmyk to RGB, 16_bit channels to 8, the first of several
    frames or pages, rotated ones upright as their EXIF tag says."""
    image_root: str | None = None
    """Folder that relative image paths start from; default: the data file's. Paths that lead out of it are refused."""
    url_timeout_seconds: MayChange[PositiveFloat] = 20.0
    """Time limit for one image, redirects included."""
    url_retries: MayChange[NonNegativeInt] = 2
    """Further tries where the server is busy, broken or unreachable."""
    url_host_pause_seconds: MayChange[NonNegativeFloat] = 60.0
    """Time for which a host that failed for three images in a row is not asked again; 0: ask it for every image."""
    allow_private_addresses: bool = False
    """Allow image URLs that resolve to this machine or its private network."""
    url_cache_gib: MayChange[NonNegativeFloat] = 8.0
    """Disk in run_dir/images for downloaded images; 0: download each time."""
    cache_dir: MayChange[str] = "~/.cache/fovea"
    """Folder for copies of remote data files, and of Parquet files whose row groups are too large to read singly."""
    shuffle: bool = True
    """Train on rows in random order; false: in that of the files, epoch after epoch."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Sampling weight of each question type in RL, relative to its share of the rows; default 1."""
    prompt_cache_gib: MayChange[NonNegativeFloat] = 1.0
    """Memory for processed prompts and images; the least recently used are evicted."""


class Rollout(Section):
    """Sampling of completions."""

    engine: EngineConfig = Field(default_factory=EmbeddedEngine)
    prompts_per_step: PositiveInt = 40
    """Prompts (groups) per step."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt (n): the size of a group."""
    max_new_tokens: PositiveInt = 512
    """Longest completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, applied to every log-prob in training too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the smallest set of tokens with this much probability."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0: all."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, besides the model's end token."""


class Train(Section):
    """Optimizer, schedule and micro-batches."""

    backend: BackendConfig = Field(default_factory=TorchBackend)
    learning_rate: MayChange[PositiveFloat] = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    adam_eps: PositiveFloat = 1e-8
    """Term that AdamW adds to its denominator."""
    weight_decay: MayChange[NonNegativeFloat] = 0.0
    """Decoupled weight decay of AdamW, of all weights but norms and biases."""
    max_grad_norm: MayChange[PositiveFloat] = 1.0
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
    """Largest packed micro-batch, with attention and images counted as tokens of equal cost; larger groups are
    split."""
    groups_per_microbatch: MayChange[PositiveInt] = 1
    """Groups per micro-batch where enable_dynamic_batch_size is false."""
    variable_seq_lengths: MayChange[bool] = True
    """Allow micro-batches of different lengths; false: pad each to max_tokens_per_microbatch, for compiled kernels."""
    plain_update_every_steps: MayChange[PositiveInt] = 50
    """Interval of updates that reuse no activations of the rollout and also score groups left out of the update, so
    that rollout_train_* compares two independent computations of every completion."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute each layer in the backward pass: less memory, a third more time."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Train:
        if self.groups_per_microbatch > 1 and self.enable_dynamic_batch_size:
            raise ValueError(
                f"train.groups_per_microbatch={self.groups_per_microbatch} counts groups, but "
                "train.enable_dynamic_batch_size=true fills microbatches by tokens; set "
                "train.enable_dynamic_batch_size=false, or train.groups_per_microbatch=1"
            )
        return self


class Warmup(Section):
    """Supervised fine-tuning before RL, for a model that starts from random weights."""

    max_steps: PositiveInt = 800
    """Most optimizer steps."""
    batch_size: PositiveInt = 32
    """Prompt-answer pairs per step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 20
    """Steps of linear learning-rate warm-up."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Sampling weight of each question type, relative to its share of the rows; default 1."""
    check_every_steps: PositiveInt = 25
    """Interval of dev evaluations for early stopping."""
    stop_accuracy: Fraction = 1.0
    """Early stopping at this dev accuracy ..."""
    stop_kind_accuracy: dict[str, Fraction] = Field(default_factory=dict)
    """... once these question types have reached theirs."""


class Evaluate(Section):
    """Greedy accuracy on held-out rows."""

    every_steps: NonNegativeInt = 0
    """Interval of dev evaluations during training; 0: never."""
    dev_size: PositiveInt = 200
    """Dev rows of one evaluation."""
    test_size: PositiveInt | None = None
    """Test rows of one evaluation; default: all."""
    before_training: bool = True
    """Evaluate on the test rows before the first step, and after a warm-up, to compare with the end."""
    batch_size: PositiveInt = 200
    """Rows generated at once."""
    shared_images: Literal["ignore", "count", "forbid"] = "count"
    """Test images that are also in the training split: count them, or stop with an error, before any training."""
    shared_images_rows: PositiveInt | None = 10_000
    """Rows of each split in which shared images are looked for, a fixed sample; null: all, however long it takes."""
    image_controls: bool = True
    """Image ablation: answer every question also with a shuffled and with a blank image, as text alone would be."""
    samples_per_prompt: NonNegativeInt = 0
    """Sampled answers per row in `fovea eval`, for pass@k and majority vote; 0: none."""
    image_type_key: str | None = None
    """Column of the image type, by which accuracies are broken down."""


class Parity(Section):
    """Check at the start of a run that engine and trainer give the same log-probs for the same completions."""

    prompts: NonNegativeInt = 4
    """Training prompts that are sampled from and scored again, with and without their images; 0: no check."""
    max_new_tokens: PositiveInt = 32
    """Longest completion of the check (at most rollout.max_new_tokens)."""
    max_search_seconds: PositiveFloat = 300.0
    """Time for finding training rows that can be used, which is long where images come from hosts that do not answer;
    the check goes on with those found by then."""
    max_abs_logprob_diff: PositiveFloat = 0.1
    """Largest mean absolute difference; above it, with or without images, the run stops.

    With images the mean may be 4 times that without, plus a tenth of this limit."""
    max_k3: PositiveFloat = 0.02
    """Largest k3 (an estimate of the KL divergence per token), with or without images; a mean difference of 0.1 gives
    0.005 where all tokens differ by as much, and far more where a few are far off."""


class Checkpoint(Section):
    """Checkpoints, from which a run resumes bit for bit."""

    every_steps: NonNegativeInt = 100
    """Interval of checkpoints; 0: before the first step and at the end only."""
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are deleted, but for the last one before a run of skipped updates."""
    keep_best: bool = False
    """Save at the best dev accuracy so far (evaluate.every_steps), and keep that checkpoint besides."""


class Log(Section):
    """Outputs of a run besides its metrics."""

    samples_every_steps: PositiveInt = 50
    """Interval at which prompts, images and answers are kept for the report."""
    tensorboard: bool = True
    """Write tensorboard/ in the run folder."""
    wandb_project: str | None = None
    """Weights & Biases project to log to (extra: wandb)."""
    progress: bool = True
    """Live display in the terminal."""
    peak_tflops: PositiveFloat | None = None
    """Peak FLOP rate that `mfu` is a share of; default: the data sheet's dense bfloat16 rate of known GPUs."""


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed of weights, data order and sampling."""
    run_dir: MayChange[Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]] = f"runs/{NAME}-{TIME}"
    """Output folder of the run: config, metrics, samples, checkpoints, report. {name} is environment.name; with {time},
    every run gets a folder of its own, and runs/latest leads to it."""
    max_steps: MayChange[PositiveInt] = 1000
    """Number of RL steps; fewer where max_epochs ends the run before."""
    max_epochs: MayChange[PositiveInt | None] = None
    """Epochs after which a run ends, if max_steps does not end it before: each takes every training row exactly once,
    and the last step the rows that are left. Default: rows are drawn by question type, without an end."""
    resume: MayChange[Literal["never", "auto"]] = "never"
    """Start anew, or (auto) resume from the newest checkpoint in run_dir, if there is one."""
    resume_changed: MayChange[Literal["error", "allow"]] = "error"
    """Handling of rows, code of your own, model files or libraries that are not those that the checkpoint was made
    with: stop and name them, or go on with what is there now."""
    threads: MayChange[PositiveInt | None] = None
    """CPU threads of torch; default: torch's own choice."""
    profile: MayChange[bool] = False
    """Profile a few steps into profile/ of the run folder: phases, operators, a trace of one step."""
    model: Model
    environment: EnvironmentConfig = Field(default_factory=ShapesEnvironment)
    reward: str | None = None
    """Reward function of your own, `path/to/file.py:function`, in place of the environment's score (docs/own.md)."""
    reward_timeout_seconds: PositiveFloat = 10.0
    """Time limit for one call of your own reward function, or of your own environment's score."""
    reward_on_failure: Literal["error", "drop"] = "error"
    """Handling of such a call that raises, is late or returns no number: stop, or drop the group
    (`groups/unscored`)."""
    reward_limit: MayChange[PositiveFloat] = 1e6
    """Largest size of a reward, from any environment or your own code; a larger one is an error that names its row."""
    reward_calls_at_once: PositiveInt = 1
    """Concurrent calls, in threads; more than 1 only for thread-safe code."""
    model_reward: ModelReward | None = None
    second_opinion: SecondOpinion | None = None
    curriculum: Curriculum = Field(default_factory=Curriculum)
    data: Data = Field(default_factory=Data)
    warmup: Warmup | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    train: Train = Field(default_factory=Train)
    evaluate: MayChange[Evaluate] = Field(default_factory=Evaluate)
    parity: MayChange[Parity] = Field(default_factory=Parity)
    checkpoint: MayChange[Checkpoint] = Field(default_factory=Checkpoint)
    log: MayChange[Log] = Field(default_factory=Log)

    @property
    def environments(self) -> dict[str, PartEnvironment]:
        """The environment, or those of the parts of a mixture, by dotted key."""
        if not isinstance(self.environment, MixtureEnvironment):
            return {"environment": self.environment}
        return {
            f"environment.parts.{name}.environment": part.environment
            for name, part in self.environment.parts.by_name.items()
        }

    @property
    def rewards(self) -> dict[str, str]:
        """The user's own reward functions, of the run and of the parts of a mixture, by dotted key."""
        parts = self.environment.parts.by_name if isinstance(self.environment, MixtureEnvironment) else {}
        of_parts = {f"environment.parts.{name}.reward": part.reward for name, part in parts.items()}
        return {key: reward for key, reward in {"reward": self.reward, **of_parts}.items() if reward is not None}

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        refuse(_disagreements(self))
        return self


def _disagreements(config: Config) -> Iterator[str]:
    """Settings of one section that cannot work with those of another."""
    algorithm, rollout = config.algorithm, config.rollout
    if config.checkpoint.keep_best and not config.evaluate.every_steps:
        yield (
            "checkpoint.keep_best=true keeps the checkpoint of the best dev reading, but evaluate.every_steps=0 takes "
            "none; set evaluate.every_steps"
        )
    if rollout.engine.decode_weights == "int8" and not algorithm.importance_sampling_fix:
        yield (
            "rollout.engine.decode_weights=int8 draws from other probabilities than those that are trained; set "
            "algorithm.importance_sampling_fix=true, or rollout.engine.decode_weights=exact"
        )
    if algorithm.minibatches > rollout.prompts_per_step:
        yield (
            f"algorithm.minibatches={algorithm.minibatches} is more than rollout.prompts_per_step="
            f"{rollout.prompts_per_step}, so that some would be empty; lower algorithm.minibatches"
        )
    advantage = algorithm.advantage.name
    compares = advantage in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
    if rollout.samples_per_prompt == 1 and (compares or algorithm.dynamic_sampling):
        which = "dynamic_sampling=true" if algorithm.dynamic_sampling else f"advantage={advantage}"
        yield (
            f"algorithm.{which} compares the completions of a prompt, but rollout.samples_per_prompt=1, so that no "
            "group has a signal; set rollout.samples_per_prompt=2 or more"
        )
    yield from _without_dev(config)
    yield from _weights_in_epochs(config)
    yield from _rewards_of_parts(config)
    yield from _second_opinion_without_a_rule(config)
    yield from _too_short(config)


def _without_dev(config: Config) -> Iterator[str]:
    """Readings of dev rows where the environment has none."""
    evaluate = config.evaluate
    if config.warmup is None and not evaluate.every_steps:
        return
    reader = f"evaluate.every_steps={evaluate.every_steps}" if evaluate.every_steps else "the stop rule of warmup"
    for key, environment in config.environments.items():
        if isinstance(environment, SplitFiles) and not environment.has_dev:
            yield (
                f"{key}.dev_share=0 leaves no dev rows, but {reader} reads them; set {key}.dev_files, or a share such "
                f"as {key}.dev_share=0.05"
            )


def _weights_in_epochs(config: Config) -> Iterator[str]:
    """Weights of rows that come exactly once."""
    if config.max_epochs is None and config.data.shuffle:
        return
    once = "data.shuffle=false" if config.max_epochs is None else f"max_epochs={config.max_epochs}"
    if isinstance(config.environment, MixtureEnvironment):
        yield (
            f"{once} takes every row once an epoch, but environment.name=mixture draws its parts by their shares; "
            f"leave {once.partition('=')[0]} out"
        )
    weights = {
        "data.kind_weights": config.data.kind_weights,
        "curriculum.level_weights": config.curriculum.level_weights,
    }
    for setting in (name for name, given in weights.items() if given):
        yield f"{once} takes every row once an epoch, but {setting} draws some more often than others; drop either"


def _rewards_of_parts(config: Config) -> Iterator[str]:
    """Rewards of parts that the run's own reward replaces."""
    of_parts = [key for key in config.rewards if key != "reward"]
    if config.reward is not None and of_parts:
        yield (
            f"reward={config.reward} scores the rows of all parts, so that {of_parts[0]} would never be asked; drop "
            "either"
        )


def _second_opinion_without_a_rule(config: Config) -> Iterator[str]:
    """A second opinion where no rule can be overruled."""
    if config.second_opinion is not None and isinstance(config.environment, MixtureEnvironment):
        yield (
            "second_opinion overrules the rule of one environment, vqa or geo3k, and environment.name=mixture has "
            "several; set second_opinion=null, or use model_reward"
        )
    ruled = isinstance(config.environment, VqaEnvironment | Geo3kEnvironment) and config.reward is None
    if config.second_opinion is not None and not ruled:
        yield (
            "second_opinion overrules the rule of environment.name=vqa or geo3k, and this run has none of these "
            "graders; set second_opinion=null, or use model_reward"
        )


def _too_short(config: Config) -> Iterator[str]:
    """Spans of steps or completions that leave no room for what they pace."""
    rollout, kl, critic = config.rollout, config.algorithm.kl, config.algorithm.critic
    samples_per_step = rollout.prompts_per_step * rollout.samples_per_prompt
    controller = kl.controller if isinstance(kl, KlInReward) else None
    if controller is not None and controller.horizon_samples <= samples_per_step:
        yield (
            f"algorithm.kl.controller.horizon_samples={controller.horizon_samples} is no more than the "
            f"{samples_per_step} completions of one step, in which the coefficient would jump; set it to many steps' "
            "worth"
        )
    if critic is not None and critic.warmup_steps >= config.max_steps:
        yield (
            f"algorithm.advantage.critic.warmup_steps={critic.warmup_steps} leaves the policy none of max_steps="
            f"{config.max_steps}; lower it, or raise max_steps"
        )
