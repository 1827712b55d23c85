"""Fovea's side of the comparisons: steps of its training loop, from rows to new weights."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import cast

from benchmarks.cases import BenchEnvironment, BenchGrader, Case, endless, make_parts, make_tasks
from benchmarks.timing import Clock, StepTimes
from fovea.advantages import with_advantages
from fovea.config.backends import EmbeddedSettings
from fovea.config.model import Lora, Model
from fovea.config.run import Config
from fovea.data.curriculum import CurriculumProgress
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.loop import take_step
from fovea.metrics.log import MetricsLog, Phases, peak_rss_gib
from fovea.metrics.progress import Progress
from fovea.models.activation_tape import Tape
from fovea.models.recompute import recompute_activations
from fovea.models.render import Renderer
from fovea.models.shared_prefix.attention import Kernel
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.rollout.collect import collect
from fovea.rollout.embedded.arguments import make_engine
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.run.checkpoint import Checkpoints
from fovea.run.context import Run, Sources, TaskStream
from fovea.run.sampling import training_sampling
from fovea.run.state import TrainState
from fovea.samples import make_batch
from fovea.train.base import Policy
from fovea.train.local import LocalPolicy
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Prompt, Sampling
from fovea.weights.sync import SharedWeights
from fovea.wiring.data import prefetch_threads
from fovea.wiring.engine import make_tape
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.images import ImageOpener
from fovea_gym.utils.event_loop import wait_for

LEARNING_RATE = 1e-6
OPENER = ImageOpener(max_image_mib=32, max_image_megapixels=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Model, engine and policy, which runs of several cases may share."""

    parts: TinyParts
    vlm: VLM
    engine: EmbeddedEngine
    policy: TorchPolicy


class Ours:
    """A run of a case; every call of `step` uses new rows."""

    def __init__(self, case: Case, steps: int, shared: Shared | None = None, clock: Clock = perf_counter) -> None:
        """Prepare rows for `steps` calls of `step`; `shared` may come from another case that has the same model."""
        self.shared = shared or share(case, make_parts(case))
        self._clock = clock
        self._run = _make_run(case, steps, self.shared, clock)
        self._step = 0
        wait_for(self._run.weight_sync.sync(0))

    def step(self) -> StepTimes:
        """Take one step, from rows to new weights, and time it."""
        started = self._clock()
        _, metrics = wait_for(take_step(self._run, TrainState(step=self._step, kl_coef=0.0)))
        whole = self._clock() - started
        assert metrics["groups/skipped"] == 0, "a group without signal was not trained on: the step did less work"
        self._step += 1
        phases = {key.removeprefix("seconds/"): value for key, value in self._run.phases.seconds().items()}
        rollout = phases["data"] + phases["rollout"]
        settings = self._run.config.rollout
        return StepTimes(
            step=whole,
            rollout=rollout,
            train=whole - rollout,
            tokens=metrics["response_tokens_mean"] * settings.prompts_per_step * settings.samples_per_prompt,
            phases=phases,
            ran_out_of_memory=metrics.get("microbatch/out_of_memory", 0) > 0,
        )

    def plain_step(self) -> StepTimes:
        """Take and time a step whose update reuses nothing from the rollout (`train.plain_update_every_steps`)."""
        self.shared.policy._steps = 0
        return self.step()

    def draw(self) -> Batch:
        """Take a rollout and return its samples, with all groups."""
        run, rollout = self._run, self._run.config.rollout
        prompted = run.sources.train.take(run.stream.order, rollout.prompts_per_step)
        drawing = collect(
            run.engine,
            run.stream.interaction,
            prompted,
            sampling=training_sampling(run.config, run.environment),
            n=rollout.samples_per_prompt,
            seed=(run.config.seed, self._step),
            for_update=True,
        )
        settings = run.config.algorithm
        batch, _ = make_batch(wait_for(drawing), settings, max_new_tokens=rollout.max_new_tokens)
        return with_advantages(batch, settings, 0.0 if settings.kl is None else settings.kl.coef)[0]

    def prompts(self, count: int) -> list[Prompt]:
        """Render the prompts of the first rows."""
        prompted = [self._run.sources.train.get(index) for index in range(count)]
        return [each.prompt for each in prompted if each is not None]


def peak_gib(case: Case, steps: int) -> float:
    """Take steps of a case; returns the peak memory of this process."""
    run = Ours(case, steps)
    for _ in range(steps):
        run.step()
    return peak_rss_gib()


def share(case: Case, parts: TinyParts, device: str = "cpu", attention: Kernel = "auto") -> Shared:
    """Create the model, engine and policy of a case."""
    config = config_of(case)
    parts = endless(parts)
    choose_trainable(parts.network, config.model, config.seed)
    recompute_activations(parts.network, config.train.gradient_checkpointing)
    cache = None if config.model.trains_vision else FeatureCache(2**30)
    vlm = VLM(parts.network, parts.processor.banned_ids, attention=attention, feature_cache=cache).to(device)
    assert isinstance(config.rollout.engine, EmbeddedSettings)
    tape = make_tape(config, vlm) if case.reused == "all" else None
    if case.reused == "images" and vlm.trains_vision:
        tape = Tape([], config.rollout.engine.kept_gib * 2**30, vlm.dtype)
    engine = make_engine(config.rollout.engine, parts.processor, vlm, tape)
    assert isinstance(engine, EmbeddedEngine), "this model family has no fast path"
    return Shared(
        parts=parts,
        vlm=vlm,
        engine=engine,
        policy=TorchPolicy(
            vlm,
            train=config.train,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_steps=config.max_steps,
            tape=tape,
        ),
    )


def config_of(case: Case) -> Config:
    """The settings of a case."""
    return Config.model_validate(
        {
            "model": Model(
                tiny=case.model,
                dtype=case.dtype,
                freeze_vision_tower=case.freeze_vision,
                lora=Lora(rank=case.lora_rank, alpha=case.lora_rank) if case.lora_rank else None,
            ),
            "rollout": {
                "prompts_per_step": case.prompts,
                "samples_per_prompt": case.samples,
                "max_new_tokens": case.completion_tokens,
                **({"engine": {"max_batch_tokens": case.max_batch_tokens}} if case.max_batch_tokens else {}),
            },
            "algorithm": {"max_groups_without_signal": case.prompts},
            "train": {
                "learning_rate": LEARNING_RATE,
                "lr_warmup_steps": 0,
                "gradient_checkpointing": case.gradient_checkpointing,
                "max_tokens_per_microbatch": case.microbatch_tokens,
            },
        }
    )


def _make_run(case: Case, steps: int, shared: Shared, clock: Clock) -> Run:
    config = config_of(case)
    environment = BenchEnvironment(make_tasks(case, case.prompts * steps))
    grading = Grading(graders=(BenchGrader(),))
    source = PromptSource(
        environment.rows,
        environment,
        Renderer(shared.parts.processor, OPENER),
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_bad_row=config.data.on_bad_row,
        cache_gib=0.0,
    )
    source.render_ahead(prefetch_threads(shared.vlm.device))
    folder = Path(tempfile.mkdtemp())
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=Sources(train=source, dev=source, test=source),
        stream=TaskStream(
            source=source,
            order=Order(["all"] * len(source), weights={}, seed=0),
            curriculum=CurriculumProgress(),
            environment=environment,
            grading=grading,
        ),
        engine=shared.engine,
        policy=cast(Policy, LocalPolicy(shared.policy)),
        weight_sync=SharedWeights(shared.engine),
        warmup=None,
        open_image=OPENER,
        evaluator=Evaluator(
            EngineAnswers(shared.engine, environment, grading),
            greedy=Sampling(max_new_tokens=1, temperature=0.0),
            batch_size=1,
        ),
        checkpoints=Checkpoints(folder, keep=1),
        resumed=None,
        metrics=MetricsLog([]),
        phases=Phases(clock),
        progress=Progress(steps, 0, enabled=False),
        started=clock(),
    )
