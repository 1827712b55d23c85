"""A bandit in place of a model: an engine and a policy over four answers, for tests of the loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from PIL import Image

from fovea.config.run import Config, Model, TinyModel
from fovea.data.order import Order, kinds_of
from fovea.environments.curriculum import Curriculum
from fovea.environments.prompt_source import PromptSource
from fovea.evaluation.evaluator import Evaluator
from fovea.metrics.log import JsonlSink, MetricsLog, Phases
from fovea.metrics.progress import Progress
from fovea.run.checkpoint import Checkpoints
from fovea.run.context import Run, Sources
from fovea.types import (
    Batch,
    Completion,
    ImageRef,
    Message,
    Metrics,
    Prompt,
    Sampling,
    Score,
    Task,
    Turn,
    Weights,
)

ANSWERS = ("a", "b", "c", "d")


class BanditEnvironment:
    """Task i wants answer i % 4, and says so in its prompt."""

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(
                id=f"{split}/{index}",
                question=ANSWERS[index % 4],
                answer=ANSWERS[index % 4],
                kind=f"kind {index % 2}",
            )
            for index in range(16)
        ]

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        right = float(turns[-1].text == task.answer)
        return Score(reward=right, accuracy=right, parts={"answer": right})


class BanditRenderer:
    """One token per prompt: the number of its answer."""

    def prompt(self, messages: Sequence[Message], where: str = "") -> Prompt:
        token = ANSWERS.index(str(messages[0].parts[0]))
        return Prompt(token_ids_L=np.array([token]), positions_3L=np.zeros((3, 1), dtype=np.int64), next_position=1)


class BanditPolicy:
    """A table of preferences, learned by REINFORCE on the advantages it is handed."""

    def __init__(self) -> None:
        self.table = np.zeros((4, 4))
        self.updates = 0
        self.batches: list[Batch] = []

    def start_here(self) -> None: ...

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        return [
            log_softmax(self.table[group.prompt.token_ids_L[0]])[sample.token_ids_T].astype(np.float32)
            for group in batch.groups
            for sample in group.samples
        ]

    def reference_logprobs(self, batch: Batch) -> list[np.ndarray]:
        return [np.full(1, -np.log(4), dtype=np.float32) for group in batch.groups for _ in group.samples]

    def logprobs_and_values(self, batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return self.logprobs(batch), self.values(batch)

    def values(self, batch: Batch) -> list[np.ndarray]:
        return [np.full(1, 0.5, dtype=np.float32) for _ in batch.samples]

    def update(self, batch: Batch) -> Metrics:
        self.batches.append(batch)
        for group in batch.groups:
            row = self.table[group.prompt.token_ids_L[0]]
            for sample in group.samples:
                gradient = np.eye(4)[sample.token_ids_T[0]] - np.exp(log_softmax(row))
                assert sample.advantages_T is not None
                row += 0.2 * sample.advantages_T[0] * gradient
        self.updates += 1
        return {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 0.2}

    def weights(self) -> Weights:
        return [("table", self.table.copy())]  # type: ignore[list-item]

    def save(self, folder: Path) -> None:
        (folder / "table.json").write_text(json.dumps([self.table.tolist(), self.updates]))

    def load(self, folder: Path) -> None:
        table, self.updates = json.loads((folder / "table.json").read_text())
        self.table = np.array(table)


class BanditEngine:
    """Draws one token from the table that it was given last."""

    def __init__(self) -> None:
        self.version = -1
        self.seeds: list[int] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int) -> list[Completion]:
        self.seeds.append(sampling.seed)
        logprobs = log_softmax(self.table[prompt.token_ids_L[0]])
        drawn = np.random.default_rng(sampling.seed).choice(4, n, p=np.exp(logprobs))
        if sampling.temperature == 0:
            drawn = np.full(n, logprobs.argmax())
        return [
            Completion(
                token_ids_T=np.array([token]),
                logprobs_T=logprobs[[token]].astype(np.float32),
                text=ANSWERS[token],
                finish="stop",
                version=self.version,
            )
            for token in drawn
        ]

    def load_weights(self, weights: Weights, version: int) -> None:
        self.table = np.array(dict(weights)["table"])
        self.version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def no_image(_ref: ImageRef) -> Image.Image:
    raise AssertionError("the bandit has no images")


def bandit_run(folder: Path, *, resume: bool = False, **settings: object) -> Run:
    """A run of fakes with the real order, metrics and checkpoints."""
    defaults = {
        "max_steps": 30,
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 1},
        "checkpoint": {"every_steps": 10},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
    }
    config = Config.model_validate({"model": Model(tiny=TinyModel()), **defaults, **settings})
    environment, engine = BanditEnvironment(), BanditEngine()
    folder.mkdir(exist_ok=True)

    def source(split: str) -> PromptSource:
        return PromptSource(
            environment.tasks(split),
            environment,
            BanditRenderer(),
            max_prompt_tokens=10,
            on_bad_row="error",
            cache_gib=0.0,
        )

    checkpoints = Checkpoints(folder, keep=2)
    resumed = checkpoints.latest() if resume else None
    train = source("train")
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=Sources(train=train, dev=source("dev"), test=source("test")),
        order=Order(kinds_of(train.tasks), weights={}, seed=config.seed),
        curriculum=Curriculum(environment, config.curriculum),
        engine=engine,
        policy=BanditPolicy(),
        warmup=None,
        open_image=no_image,
        evaluator=Evaluator(engine, environment, max_new_tokens=1, stop=(), batch_size=5),
        checkpoints=checkpoints,
        resumed=resumed,
        metrics=MetricsLog([JsonlSink(folder, resume_step=resumed.step if resumed else 0)]),
        phases=Phases(),
        progress=Progress(config.max_steps, 0, enabled=False),
        started=perf_counter(),
    )
