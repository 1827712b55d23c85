"""The tree of all settings: typed, strict, with units in names. It does not import torch, so that it loads fast.

Precedence: the defaults below < recipe files, left to right < `key.sub=value` on the command line
(`fovea.config.loading`). A setting is stored once; nothing writes to the tree after it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fovea.config.algorithm import Algorithm
from fovea.config.checks import disagreements
from fovea.config.curriculum import Curriculum
from fovea.config.model import Model
from fovea.config.sections import Checkpoint, Cluster, Data, Evaluate, Log, Parity, Plan, Rollout, Train, Warmup
from fovea_gym.settings.base import (
    FiniteFloat,
    MayChange,
    NonNegativeInt,
    NumThreads,
    PositiveInt,
    Seconds,
    Section,
    Tree,
)
from fovea_gym.settings.environments import EnvironmentConfig, MixtureEnvironment, PartEnvironment, ShapesEnvironment
from fovea_gym.settings.rewards import GradingModel, Judge, RewardModel, RewardPlace, RewardShare, reward_tuple
from fovea_gym.settings.splits import SplitFiles

NAME, TIME = "{name}", "{time}"
"""Placeholders in `run_dir`."""


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed of weights, data order and sampling."""
    run_dir: MayChange[Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]] = f"runs/{NAME}-{TIME}"
    """Output folder of the run: config, metrics, samples, checkpoints, report. {name} is environment.name; with {time},
    every run gets a separate folder, and runs/latest points to it."""
    max_steps: MayChange[PositiveInt] = 1000
    """Number of RL steps; fewer if max_epochs ends the run earlier."""
    max_epochs: MayChange[PositiveInt | None] = None
    """Number of epochs after which a run ends, unless max_steps ends it earlier. Each epoch uses every training row
    exactly once, and the last step uses the rows that are left. Default: rows are sampled by question type, without an
    end."""
    max_hours: MayChange[Annotated[float, Field(gt=0, le=1e5)] | None] = None
    """Hours after which this command finishes its step, saves and ends, to be continued with resume=auto; a resumed run
    counts from zero. Set it to a scheduler's time limit minus the time of a step. Default: no limit."""
    max_restarts: MayChange[NonNegativeInt] = 0
    """How often `fovea train` restarts a run from its last checkpoint after it died (killed, crashed, out of memory, a
    worker lost); a new checkpoint resets the count. 0: never (docs/faults.md)."""
    resume: MayChange[Literal["never", "auto"] | str] = "never"
    """never: start a new run; auto: resume from the newest checkpoint in run_dir, if there is one. Or the folder of the
    checkpoint to resume from, such as runs/x/checkpoints/step-100: one of the run in run_dir, or one of another run for
    a new run_dir."""
    resume_changed: MayChange[Literal["error", "allow"]] = "error"
    """Action if rows, your own code, model files or libraries differ from those of the checkpoint: stop and name them,
    or continue with the current ones."""
    threads: MayChange[NumThreads | None] = None
    """Number of CPU threads of torch; default: torch's default."""
    profile: MayChange[bool] = False
    """Profile a few steps into profile/ of the run folder: phases, operators, a trace of one step."""
    model: Model
    environment: EnvironmentConfig = Field(default_factory=ShapesEnvironment)
    reward: str | tuple[str, ...] | None = None
    """Your own reward function, `path/to/file.py:function`, or a list of them, in place of the environment's score
    (docs/own.md). A run that got a function from Python code shows `python:module.name` here."""
    reward_weights: tuple[FiniteFloat, ...] | None = None
    """Weights of a list of rewards, in their order; the reward is the weighted sum. Default: 1 each."""
    reward_timeout_seconds: Seconds = 10.0
    """Time limit for one call of your own reward (for a list: of all together), or of your own environment's score."""
    reward_on_failure: Literal["error", "drop", "drop_completion"] = "error"
    """Action if a call raises, is late or does not return a number: stop, or drop the group (`groups/unscored`) or only
    the completion (`episodes/failed`)."""
    reward_calls_at_once: NumThreads = 1
    """Number of concurrent calls, each in a thread (more than 1 only for thread-safe code) or a process."""
    reward_in: MayChange[RewardPlace] = "thread"
    """Place where reward functions from files are called: in threads of the run, or in separate processes. A process
    whose call is late is killed and started again, even if the call holds the interpreter lock (docs/own.md)."""
    judge: Judge | None = None
    reward_model: RewardModel | None = None
    model_reward: dict[GradingModel, RewardShare] | None = None
    """Share of the reward that is the score (0..1) of `judge` or `reward_model` for the last turn, in any environment;
    the rest is the environment's own reward. Example: {judge: 0.5}."""
    second_opinion: Literal["wrong", "always"] | None = None
    """Also ask `judge`, which may overrule the rule of vqa and geo3k: about answers that the rule calls wrong, or about
    all. `reward/overruled` is how often it overrules."""
    curriculum: Curriculum = Field(default_factory=Curriculum)
    data: Data = Field(default_factory=Data)
    warmup: Warmup | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    train: Train = Field(default_factory=Train)
    evaluate: MayChange[Evaluate] = Field(default_factory=Evaluate)
    parity: MayChange[Parity] = Field(default_factory=Parity)
    cluster: MayChange[Cluster] = Field(default_factory=Cluster)
    checkpoint: MayChange[Checkpoint] = Field(default_factory=Checkpoint)
    log: MayChange[Log] = Field(default_factory=Log)
    plan: MayChange[Plan] = Field(default_factory=Plan)

    @property
    def expands_segments(self) -> bool:
        """True if torch may allocate GPU memory in segments that grow.

        False for an engine that opens tensors of this process by CUDA IPC (SGLang, or any in another environment), for
        which segments must not move, and for vLLM, which allocates from a separate pool in this process.
        """
        return self.model.device != "cpu" and self.rollout.engine.lets_segments_grow

    @property
    def copies_reference(self) -> bool:
        """True if the KL term needs a copy of the model that RL begins with.

        With LoRA, switching the adapters off gives that model, unless they had an effect before RL began.
        """
        lora = self.model.lora
        adapters_off_is_the_start = lora is not None and lora.adapter is None and self.warmup is None
        return self.algorithm.kl is not None and not adapters_off_is_the_start

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint that `resume` names; None for never and auto."""
        return None if self.resume in ("never", "auto") else Path(self.resume).expanduser()

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
    def rewards(self) -> dict[str, tuple[str, ...]]:
        """The user's own reward functions, of the run and of the parts of a mixture, by dotted key."""
        parts = self.environment.parts.by_name if isinstance(self.environment, MixtureEnvironment) else {}
        of_parts = {f"environment.parts.{name}.reward": reward_tuple(part.reward) for name, part in parts.items()}
        return {key: specs for key, specs in {"reward": reward_tuple(self.reward), **of_parts}.items() if specs}

    @property
    def with_own_files(self) -> Config:
        """The settings with the names of files in the run folder (`{run_dir}/...`) expanded."""
        return self.with_files_of(self.run_dir)

    def with_files_of(self, run_folder: str) -> Config:
        """The settings with the files of a run folder in place of `{run_dir}/...`."""
        if not isinstance(self.environment, SplitFiles):
            return self
        return self.model_copy(update={"environment": self.environment.inside(run_folder)})

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The settings as given; with completions of older weights, old_logprobs=engine is the default."""
        tree = super().completed(given)
        rollout, algorithm = tree.get("rollout"), tree.get("algorithm", {})
        if isinstance(rollout, dict) and rollout.get("max_staleness_steps") and isinstance(algorithm, dict):
            ratio = {} if algorithm.get("importance_sampling_fix") else {"old_logprobs": "engine"}
            tree["algorithm"] = ratio | algorithm
        return tree

    def contradictions(self) -> Iterator[str]:
        """Contradictions between the settings of two sections."""
        return disagreements(self)
