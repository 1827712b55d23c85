"""The one tree of settings: typed, strict, units in names. Imports no torch, so that it loads in a blink.

Precedence: the defaults below < recipe files, left to right < `key.sub=value` on the command line
(`fovea.config.loading`). A setting is stored once; nothing writes to the tree after it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from fovea.config.algorithm import Algorithm, Critic
from fovea.config.base import (
    Fraction,
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
    EnvironmentConfig,
    FileEnvironment,
    Geo3kEnvironment,
    Judge,
    OwnEnvironment,
    RewardModel,
    ShapesEnvironment,
    VqaEnvironment,
)
from fovea.config.model import Lora, Model, TinyModel

# part of the tree, from files of their own
__all__ = [
    "Algorithm",
    "CaptionEnvironment",
    "Critic",
    "Curriculum",
    "EnvironmentConfig",
    "FileEnvironment",
    "Geo3kEnvironment",
    "GeoSpotEnvironment",
    "Judge",
    "Lora",
    "Model",
    "OwnEnvironment",
    "RewardModel",
    "Section",
    "ShapesEnvironment",
    "TinyModel",
    "VqaEnvironment",
]

Conversion: TypeAlias = Literal["cmyk", "16_bit", "frames", "rotated"]


class Data(Section):
    """What happens to rows and images on their way in."""

    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot become a prompt: stop, or drop it, count it (`data/rows_skipped`) and list it."""
    max_prompt_tokens: PositiveInt = 2048
    """Longer prompts (visual tokens counted) are bad rows; nothing is ever cut."""
    max_image_mib: PositiveFloat = 32.0
    """Larger image files are refused, and so is what a URL sends beyond it."""
    max_image_megapixels: PositiveFloat = 64.0
    """Images of more pixels are refused before they are decoded."""
    convert_images: tuple[Conversion, ...] = ()
    """Images to be converted instead of refused: colours for printing, 16 bits a channel to 8, the first of several
    frames or pages, upright where a camera noted its rotation."""
    image_root: str | None = None
    """Folder in which the rows' image paths start; default: that of the data file. Paths out of it are refused."""
    url_timeout_seconds: PositiveFloat = 20.0
    """For one image, redirects and all."""
    max_url_redirects: NonNegativeInt = 5
    """Of one image."""
    url_retries: NonNegativeInt = 2
    """Tries after the first where the server is busy, broken or away."""
    allow_private_addresses: bool = False
    """Let URLs of rows reach this machine and its own network."""
    url_cache_gib: NonNegativeFloat = 8.0
    """Disk in run_dir/images for what URLs have sent; 0: fetch it again each time."""
    cache_dir: str = "~/.cache/fovea"
    """Folder for copies of remote data files, and of Parquet files that cannot be read in small pieces."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """How often each question type is drawn for RL, relative to its share of the rows; default 1."""
    prompt_cache_gib: NonNegativeFloat = 1.0
    """Memory for prompts whose images were processed before; the least recently used go first."""


class Rollout(Section):
    """How completions are drawn."""

    engine: Literal["embedded"] = "embedded"
    """The embedded engine shares the trainer's weights without a copy."""
    prompts_per_step: PositiveInt = 40
    """Groups of one step."""
    samples_per_prompt: PositiveInt = 8
    """n: completions of one prompt, the size of a group."""
    max_new_tokens: PositiveInt = 512
    """Longest completion."""
    temperature: PositiveFloat = 1.0
    """Of sampling and of every log-prob in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this much probability."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0: all."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this share of the likeliest one's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, besides the model's own end token."""
    max_batch_tokens: PositiveInt = 65_536
    """Key-value cache of the embedded engine: prompts once, plus max_new_tokens of each running completion."""
    decode_weights: Literal["exact", "int8"] = "exact"
    """int8 (CPU): faster, and completions come from slightly other probabilities: needs importance_sampling_fix."""
    reuse_gib: NonNegativeFloat = 2.0
    """Memory for what the rollout computes and the update needs again (CPU, no gradient_checkpointing); 0: none."""


class Train(Section):
    """The optimizer and how a batch is cut."""

    learning_rate: PositiveFloat = 1e-6
    """Peak rate of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay of the two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's, decoupled."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    max_skipped_updates: NonNegativeInt = 3
    """Updates in a row that may end early because something was not finite; one more stops the run."""
    lr_warmup_steps: NonNegativeInt = 10
    """Steps of linear rise."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak at the end of the rise to final_lr_frac at max_steps."""
    final_lr_frac: Fraction = 0.0
    """Rate at max_steps as a share of the peak (linear and cosine)."""
    enable_dynamic_batch_size: bool = True
    """Fill microbatches by their work, as even as can be; false: groups_per_microbatch groups each."""
    max_tokens_per_microbatch: PositiveInt = 16_384
    """Packed tokens of a microbatch (larger groups are split), attention and images counted as tokens of equal work."""
    groups_per_microbatch: PositiveInt = 1
    """Groups of a microbatch where enable_dynamic_batch_size is false."""
    variable_seq_lengths: bool = True
    """false: pad every microbatch to max_tokens_per_microbatch tokens, for kernels that are compiled for one length."""
    logits_mib: PositiveFloat = 512.0
    """Memory for logits that exist at once; a row with more makes them in turns, and again in the backward pass."""
    plain_update_every_steps: PositiveInt = 50
    """How often an update reuses nothing of its rollout and scores what it leaves out or dynamic sampling dropped, too:
    rollout_train_* then compares two separate computations of all that was drawn."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    liger_kernels: bool = False
    """Liger's Triton kernels for RMS norm, SwiGLU and rotary positions; CUDA only (extra: liger)."""

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
    """Supervised pairs before RL, so that a model that starts from nothing has something to reinforce."""

    max_steps: PositiveInt = 800
    """At most this many."""
    batch_size: PositiveInt = 32
    """Pairs of a step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 20
    """Steps of linear rise."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's, decoupled."""
    kind_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """How often each question type is drawn, relative to its share of the rows; default 1."""
    check_every_steps: PositiveInt = 25
    """How often the stop rule is read."""
    stop_accuracy: Fraction = 1.0
    """Stop at this accuracy on dev ..."""
    stop_kind_accuracy: dict[str, Fraction] = Field(default_factory=dict)
    """... once these question types have reached theirs."""


class Evaluate(Section):
    """Greedy accuracy on held-out rows."""

    every_steps: NonNegativeInt = 0
    """Read dev accuracy this often while training; 0: never."""
    dev_size: PositiveInt = 200
    """Dev rows of such a reading."""
    test_size: PositiveInt | None = None
    """Rows of the final table; default: all."""
    batch_size: PositiveInt = 200
    """Rows in flight at once."""
    shared_images: Literal["ignore", "count", "forbid"] = "count"
    """Test images that are also in the training split: count them, or stop with an error, before any training."""
    image_controls: bool = True
    """Also answer every question with another row's image and with a blank one: what the text alone gives."""
    samples_per_prompt: NonNegativeInt = 0
    """In `fovea eval`: this many answers to each row, drawn as the rollout draws, for pass@k and majority; 0: none."""
    image_type_key: str | None = None
    """In `fovea eval`: the key of a row that says of which type its images are, to tell accuracies apart by."""


class Parity(Section):
    """The gate at the start of a run: the engine's log-probs of what it draws against the trainer's of the same."""

    prompts: NonNegativeInt = 4
    """First training rows that are drawn from and scored again, each with and without its images; 0: no gate."""
    max_new_tokens: PositiveInt = 32
    """Longest completion of the gate (never above rollout.max_new_tokens)."""
    max_abs_logprob_diff: PositiveFloat = 0.1
    """The run stops when the mean absolute difference, with or without images, is above this."""


class Checkpoint(Section):
    """When a run is saved, so that it can go on bit for bit."""

    every_steps: NonNegativeInt = 100
    """0: before the first step and at the end only."""
    keep: PositiveInt = 2
    """Older ones are deleted."""


class Log(Section):
    """What a run writes down."""

    samples_every_steps: PositiveInt = 50
    """How often prompts, images and answers are kept for the report."""
    samples_prompts: PositiveInt = 4
    """Prompts of such a record."""
    samples_answers: PositiveInt = 4
    """Answers shown of each."""
    tensorboard: bool = True
    """Write tensorboard/ in the run folder."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (extra: wandb)."""
    progress: bool = True
    """Live display in the terminal."""
    peak_tflops: PositiveFloat | None = None
    """What `mfu` is a share of; default: the data sheet's dense bfloat16 rate, where the GPU is a known one."""


class Config(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of weights, data order and sampling."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/run"
    """Folder of this run: config, metrics, samples, checkpoints, report."""
    max_steps: PositiveInt = 1000
    """RL steps."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest checkpoint in run_dir, if there is one."""
    threads: PositiveInt | None = None
    """CPU threads of torch; default: torch's own choice."""
    profile: bool = False
    """Write where the time of a few steps goes to profile/ of the run folder: phases, operators, a trace of one."""
    model: Model
    environment: EnvironmentConfig = Field(default_factory=ShapesEnvironment)
    reward: str | None = None
    """`path/to/file.py:function`: a function of your own that scores in place of the environment (docs/own.md)."""
    reward_timeout_seconds: PositiveFloat = 10.0
    """For one call of your own function, or of your own environment's score."""
    reward_on_failure: Literal["error", "drop"] = "error"
    """When such a call raises, is late or returns no number: stop, or leave the group out (`groups/unscored`)."""
    reward_calls_at_once: PositiveInt = 1
    """Such calls at a time, in threads; more than 1 only where your code can be called so."""
    curriculum: Curriculum = Field(default_factory=Curriculum)
    data: Data = Field(default_factory=Data)
    warmup: Warmup | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    critic: Critic = Field(default_factory=Critic)
    train: Train = Field(default_factory=Train)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    parity: Parity = Field(default_factory=Parity)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    log: Log = Field(default_factory=Log)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        refuse(_disagreements(self))
        return self


def _disagreements(config: Config) -> Iterator[str]:
    """Settings of one section that cannot work with those of another."""
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.decode_weights == "int8" and not algorithm.importance_sampling_fix:
        yield (
            "rollout.decode_weights=int8 draws from other probabilities than those that are trained; set "
            "algorithm.importance_sampling_fix=true, or rollout.decode_weights=exact"
        )
    if algorithm.minibatches > rollout.prompts_per_step:
        yield (
            f"algorithm.minibatches={algorithm.minibatches} is more than rollout.prompts_per_step="
            f"{rollout.prompts_per_step}, so that some would be empty; lower algorithm.minibatches"
        )
    if rollout.samples_per_prompt == 1 and (algorithm.advantage == "rloo" or algorithm.dynamic_sampling):
        which = "dynamic_sampling=true" if algorithm.dynamic_sampling else "advantage=rloo"
        yield (
            f"algorithm.{which} compares the completions of a prompt, but rollout.samples_per_prompt=1; set "
            "rollout.samples_per_prompt=2 or more"
        )
    samples_per_step = rollout.prompts_per_step * rollout.samples_per_prompt
    if algorithm.kl_target is not None and algorithm.kl_horizon_samples <= samples_per_step:
        yield (
            f"algorithm.kl_horizon_samples={algorithm.kl_horizon_samples} is no more than the {samples_per_step} "
            "completions of one step, in which kl_coef would jump; set it to many steps' worth"
        )
    if algorithm.needs_values and config.critic.warmup_steps >= config.max_steps:
        yield (
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of max_steps={config.max_steps}; "
            "lower critic.warmup_steps, or raise max_steps"
        )
    # a rate alone misleads nobody, and config.yaml of every run before the rate followed the policy's has one
    unread = config.critic.model_copy(update={"learning_rate": None})
    if unread != Critic() and not algorithm.needs_values:
        yield (
            f"critic is set, but algorithm.advantage={algorithm.advantage} has no value function; set "
            f"algorithm.name=ppo, or {_back_to_default(unread)}"
        )


def _back_to_default(section: Section) -> str:
    """The overrides that undo what was set."""
    default = type(section)()
    changed = [key for key in type(section).model_fields if getattr(section, key) != getattr(default, key)]
    return " ".join(f"critic.{key}={json.dumps(getattr(default, key))}" for key in changed).replace('"', "")
