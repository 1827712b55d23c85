"""One side of the comparison: Fovea's own loop, rows in and new weights out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

from PIL import Image

from benchmarks.cases import BenchEnvironment, Case, make_parts, make_tasks
from benchmarks.timing import StepTimes
from fovea.build import make_engine
from fovea.checkpoint import Checkpoints
from fovea.config import Config, Lora, Model
from fovea.data.images import open_image
from fovea.data.order import Order
from fovea.evaluate import Evaluator
from fovea.loop import take_step
from fovea.metrics import MetricsLog, Phases
from fovea.models.features import FeatureCache
from fovea.models.render import Renderer
from fovea.models.trainable import choose_trainable
from fovea.models.vlm import VLM
from fovea.prompts import PromptSource
from fovea.report.progress import Progress
from fovea.rollout.wait import wait_for
from fovea.run import Run, Sources
from fovea.train.torch_policy import TorchPolicy
from fovea.types import ImageRef

LEARNING_RATE = 1e-6


class Ours:
    """A run of a case; every call of `step` takes rows that were not seen before."""

    def __init__(self, case: Case, steps: int) -> None:
        self._run = _make_run(case, steps)
        self._step = 0
        self._run.engine.load_weights(self._run.policy.weights(), 0)

    def step(self) -> StepTimes:
        """One step, everything from rows to weights counted."""
        started = perf_counter()
        _, metrics = wait_for(take_step(self._run, self._step))
        whole = perf_counter() - started
        self._step += 1
        seconds = self._run.phases.seconds()
        rollout = sum(seconds[f"seconds/{phase}"] for phase in ("data", "rollout"))
        tokens = metrics["response_tokens_mean"] * self._run.config.rollout.prompts_per_step
        return StepTimes(
            step=whole,
            rollout=rollout,
            train=whole - rollout,
            tokens=tokens * self._run.config.rollout.samples_per_prompt,
        )


def _config(case: Case) -> Config:
    return Config.model_validate(
        {
            "model": Model(
                tiny=case.model,
                freeze_vision_tower=case.freeze_vision,
                lora=Lora(rank=case.lora_rank, alpha=case.lora_rank) if case.lora_rank else None,
            ),
            "rollout": {
                "prompts_per_step": case.prompts,
                "samples_per_prompt": case.samples,
                "max_new_tokens": case.completion_tokens,
            },
            "train": {"learning_rate": LEARNING_RATE, "lr_warmup_steps": 0},
        }
    )


def _make_run(case: Case, steps: int) -> Run:
    config = _config(case)
    parts = make_parts(case)
    # no stop token: every completion has the same length on both sides
    parts.tokenizer.eos_token = None
    assert parts.network.generation_config is not None
    parts.network.generation_config.eos_token_id = None
    choose_trainable(parts.network, config.model, config.seed)
    cache = None if config.model.trains_vision else FeatureCache(2**30)
    vlm = VLM(parts, feature_cache=cache)
    environment = BenchEnvironment(make_tasks(case, case.prompts * steps))
    engine = make_engine(config, parts, vlm)
    source = PromptSource(
        environment.rows,
        environment,
        Renderer(parts, _open),
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_bad_row="error",
        cache_gib=0.0,
    )
    folder = Path(tempfile.mkdtemp())
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=Sources(train=source, dev=source, test=source),
        order=Order(["all"] * len(source), weights={}, seed=0),
        engine=engine,
        policy=TorchPolicy(
            vlm,
            train=config.train,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            max_steps=steps,
        ),
        warmup=None,
        open_image=_open,
        evaluator=Evaluator(engine, environment, max_new_tokens=1, stop=(), batch_size=1),
        checkpoints=Checkpoints(folder, keep=1),
        resumed=None,
        metrics=MetricsLog([]),
        phases=Phases(),
        progress=Progress(steps, 0, enabled=False),
        started=perf_counter(),
    )


def _open(ref: ImageRef) -> Image.Image:
    return open_image(ref, max_mib=32, max_megapixels=64)
