"""Fake services for tests of the loop: a contextual bandit with four answers in place of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.data.curriculum import CurriculumProgress
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.metrics.log import JsonlSink, MetricsLog, Phases
from fovea.metrics.progress import Progress
from fovea.run.checkpoint import Checkpoints
from fovea.run.context import Run, Sources, TaskStream
from fovea.samples import with_old_logprobs, with_reference_logprobs, with_values
from fovea.train.base import ModelFacts, Needs, SftExample
from fovea.types import Batch, Completion, Metrics, Prompt, Request, Sampling
from fovea.weights.base import SyncReport
from fovea_gym.environments.stages import Stage, Stages
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.tasks import kinds_of
from fovea_gym.types import ImageRef, Message, Score, Task, ToolSpec, Turn
from gym_tests.bandit import ANSWERS, BanditEnvironment, graded
from tests.records import completion_of, text_prompt


class BanditRenderer:
    """Renderer with one token per prompt: the number of its answer."""

    most_tokens: int | None = None

    def fewest_tokens(self, _messages: Sequence[Message]) -> int:
        return 1

    def prompt(self, messages: Sequence[Message], where: str = "", tools: Sequence[ToolSpec] = ()) -> Prompt:
        token = ANSWERS.index(str(messages[0].parts[0]))
        return text_prompt([token])

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "") -> Prompt:
        raise AssertionError("the bandit's episodes have one turn")


class BanditPolicy:
    """Policy with a table of logits, trained by REINFORCE on the batch's advantages."""

    def __init__(self, *, shared_trunk: bool = True) -> None:
        """`shared_trunk`: computes old log-probs along with values, as a value head on the policy does."""
        self.shared_trunk = shared_trunk
        self.table = np.zeros((4, 4))
        self.updates = 0
        self.batches: list[Batch] = []

    async def snapshot_reference(self) -> None: ...

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        return {"loss": 0.0}

    async def export(self, folder: Path) -> None: ...

    def describe(self) -> ModelFacts:
        return ModelFacts(device="cpu", device_name=None, parameters=())

    async def close(self) -> None: ...

    async def compute_logprobs(self, batch: Batch, needs: Needs) -> Batch:
        if needs.old_logprobs or (needs.values and self.shared_trunk):
            batch = with_old_logprobs(batch, self.logprobs(batch))
        if needs.values:
            batch = with_values(batch, [np.full(1, 0.5, dtype=np.float32) for _ in batch.samples])
        return with_reference_logprobs(batch, self.reference_logprobs(batch)) if needs.reference_logprobs else batch

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        rows = [(log_softmax(self.table[group.prompt.token_ids_L[0]]), group) for group in batch.groups]
        return [row[sample.token_ids_T].astype(np.float32) for row, group in rows for sample in group.samples]

    def reference_logprobs(self, batch: Batch) -> list[np.ndarray]:
        return [np.full(1, -np.log(4), dtype=np.float32) for group in batch.groups for _ in group.samples]

    async def update(self, batch: Batch) -> Metrics:
        self.batches.append(batch)
        for group in batch.groups:
            row = self.table[group.prompt.token_ids_L[0]]
            for sample in group.samples:
                gradient = np.eye(4)[sample.token_ids_T[0]] - np.exp(log_softmax(row))
                assert sample.advantages_T is not None
                row += 0.2 * sample.advantages_T[0] * gradient
        self.updates += 1
        return {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 0.2}

    async def save(self, folder: Path) -> None:
        (folder / "table.json").write_text(json.dumps([self.table.tolist(), self.updates]))

    async def finish_save(self) -> None: ...

    async def limit_microbatches(self, max_tokens: int) -> None: ...

    async def load(self, folder: Path) -> None:
        table, self.updates = json.loads((folder / "table.json").read_text())
        self.table = np.array(table)


class BanditEngine:
    """Engine that samples one token from the table of the last weight sync."""

    def __init__(self) -> None:
        self.version = -1
        self.seeds: list[int] = []

    async def generate(self, request: Request) -> list[Completion]:
        prompt, sampling, n = request.prompt, request.sampling, request.n
        self.seeds.append(sampling.seed)
        logprobs = log_softmax(self.table[prompt.token_ids_L[0]])
        drawn = np.random.default_rng(sampling.seed).choice(4, n, p=np.exp(logprobs))
        if sampling.temperature == 0:
            drawn = np.full(n, logprobs.argmax())
        fields = [{"logprobs_T": logprobs[[token]].astype(np.float32), "text": ANSWERS[token]} for token in drawn]
        return [
            completion_of([token], id=f"{request.id}/{index}", version=self.version, **more)
            for index, (token, more) in enumerate(zip(drawn, fields, strict=True))
        ]

    name = "bandit"

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class BanditSync:
    """Copies the policy's table to the engine."""

    def __init__(self, policy: BanditPolicy, engine: BanditEngine) -> None:
        self._policy = policy
        self._engine = engine

    async def sync(self, version: int) -> SyncReport:
        self._engine.table, self._engine.version = self._policy.table.copy(), version
        return SyncReport(version=version, num_tensors=1, bytes_copied=0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def no_image(_ref: ImageRef) -> Image.Image:
    raise AssertionError("the bandit has no images")


def bandit_run(folder: Path, *, resume: bool = False, stages: Stages | None = None, **settings: object) -> Run:
    """Make a run of fake services with real data order, metrics and checkpoints."""
    defaults = {
        "max_steps": 30,
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 1},
        "checkpoint": {"every_steps": 10},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
    }
    config = Config.model_validate({"model": Model(tiny=TinyModel()), **defaults, **settings})
    environment, engine = BanditEnvironment(), BanditEngine()
    critic = config.algorithm.critic
    policy = BanditPolicy(shared_trunk=critic is not None and critic.trunk != "separate")
    folder.mkdir(exist_ok=True)

    def source(split: str) -> PromptSource:
        limits: Any = {"max_prompt_tokens": 10, "on_bad_row": "error", "cache_gib": 0.0}
        return PromptSource(environment.tasks(split), environment, BanditRenderer(), **limits)

    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    resumed = checkpoints.resume() if resume else None
    train = source("train")
    answers = EngineAnswers(engine, environment, graded(environment))
    stream = TaskStream(
        source=train,
        order=Order(kinds_of(train.tasks), weights={}, seed=config.seed),
        curriculum=CurriculumProgress(stages, config.curriculum),
        environment=environment,
        grading=graded(environment),
    )
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=Sources(train=train, dev=source("dev"), test=source("test")),
        stream=stream,
        engine=engine,
        policy=policy,
        weight_sync=BanditSync(policy, engine),
        warmup=None,
        open_image=no_image,
        evaluator=Evaluator(answers, greedy=Sampling(max_new_tokens=1, temperature=0.0), batch_size=5),
        checkpoints=checkpoints,
        resumed=resumed,
        metrics=MetricsLog([JsonlSink(folder, resume_step=resumed.step if resumed else 0)]),
        phases=Phases(),
        progress=Progress(config.max_steps, 0, enabled=False),
        started=perf_counter(),
    )


STAGES = Stages(stages=[Stage(name=f"pay {pay}", facts={"pay": pay / 3}) for pay in (1, 2, 3)], default_starts=(2, 5))


class StageGrader:
    """Stage k pays (k + 1) / 3 for a right answer."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        plain = BanditEnvironment().score(task, turns)
        return Score(reward=plain.reward * (self.stage + 1) / 3, accuracy=plain.accuracy)


def staged_run(folder: Path, *, resume: bool = False, **settings: object) -> Run:
    run = bandit_run(folder, resume=resume, stages=STAGES, **settings)
    return replace(run, stream=replace(run.stream, grading=Grading(graders=tuple(map(StageGrader, range(3))))))


def printed_in(run: Run) -> list[str]:
    """The lines that a run prints from now on."""
    lines: list[str] = []
    run.progress.print = lambda line: lines.append(str(line))  # type: ignore[method-assign]
    return lines


def run_with(policy: BanditPolicy, folder: Path, *, resume: bool = False, **settings: object) -> Run:
    run = bandit_run(folder, resume=resume, **settings)
    run.policy.__class__ = type(policy)
    run.policy.__dict__ |= policy.__dict__
    return run
