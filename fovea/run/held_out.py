"""Evaluations of a run's held-out rows: stored answers, image ablations, and images that two splits share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from fovea.data.pixel_hashes import pixel_hashes
from fovea.errors import TrainError
from fovea.evaluation.controls import (
    SharedImages,
    find_shared_images,
    image_controls,
    pictured_tasks,
)
from fovea.evaluation.json_file import write_answers
from fovea.evaluation.records import AnsweredRow
from fovea.evaluation.statistics import sampled_dev_metrics
from fovea.report.held_out import MAX_PICTURED, read_pictures, thumbnails, write_pictures
from fovea.run.callbacks import EvalRecord
from fovea.run.context import Run
from fovea.run.sampling import evaluation_sampling
from fovea.types import Evaluation, Metrics
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.types import Task


async def evaluate_test(run: Run, when: str, step: int) -> Evaluation:
    """Evaluate the engine's weights on test rows; the answers are stored as answers/test-WHEN.jsonl."""
    return await _evaluate(run, "test", when, step, run.config.evaluate.test_size)


async def evaluate_controls(run: Run) -> tuple[Evaluation | None, Evaluation | None]:
    """Image ablations: evaluate on test rows with shuffled and with blank images; None if no row has an image."""
    source, size = run.sources.test, run.config.evaluate.test_size
    tasks = pictured_tasks(source, min(size or len(source), len(source)), run.progress.print)
    controls = image_controls(source, tasks, run.open_image)
    shuffled, blank = [await run.evaluator.evaluate(each) if len(each) else None for each in controls]
    return shuffled, blank


async def read_dev(run: Run, when: str, step: int) -> Evaluation:
    """Evaluate the engine's weights on dev rows; the answers are stored as answers/dev-WHEN.jsonl."""
    return await _evaluate(run, "dev", when, step, run.config.evaluate.dev_size)


Split: TypeAlias = Literal["dev", "test"]


async def _evaluate(run: Run, split: Split, when: str, step: int, size: int | None) -> Evaluation:
    source = run.sources.dev if split == "dev" else run.sources.test

    pictured: dict[str, Task] = {}

    def keep(rows: Sequence[AnsweredRow]) -> None:
        write_answers(run.folder, f"{split}-{when}", rows)
        pictured.update((row.id, source.tasks[row.index]) for row in rows[:MAX_PICTURED])

    evaluation = await run.evaluator.evaluate(source, size, keep)
    await asyncio.to_thread(_keep_pictures, run, split, pictured)
    run.callbacks.evaluated(EvalRecord(step=step, split=split, when=when, evaluation=evaluation, folder=run.folder))
    return evaluation


def _keep_pictures(run: Run, split: Split, tasks: Mapping[str, Task]) -> None:
    """Store thumbnails of the rows for the report, unless an earlier evaluation has stored them."""
    try:
        stored = set(read_pictures(run.folder, split))
    except DataError:  # the file is damaged, so it is written again
        stored = set()
    if any(task.images for task in tasks.values()) and not tasks.keys() <= stored:
        write_pictures(run.folder, split, {row: _pictures(run, task) for row, task in tasks.items()})


def _pictures(run: Run, task: Task) -> list[bytes]:
    """Thumbnails of a row's images; an empty list if an image can no longer be opened."""
    try:
        return thumbnails(map(run.open_image, task.images))
    except BadRowError:
        return []


async def sample_dev(run: Run) -> Metrics:
    """Sample n answers to each dev row with the engine's weights: `dev/mean@n`, `dev/pass@n`; no metrics if n is 0."""
    settings = run.config.evaluate
    if not settings.dev_samples_per_prompt:
        return {}
    rows = await run.evaluator.answers(
        run.sources.dev,
        settings.dev_size,
        sampling=evaluation_sampling(run.config, run.environment),
        n=settings.dev_samples_per_prompt,
        seed=run.config.seed,
        unscored=[],  # the greedy evaluation of the same rows counts and records them
    )
    return sampled_dev_metrics([[answer.accuracy for answer in row.answers] for row in rows])


def search_shared_images(run: Run) -> SharedImages | None:
    """Look for test images in the training split; TrainError if there is one and the settings forbid it."""
    settings, data = run.config.evaluate, run.config.data
    if settings.shared_images == "ignore":
        return None
    folder, salt = Path(data.cache_dir).expanduser(), " ".join(data.convert_images)
    with pixel_hashes(folder, run.open_image, salt) as pixel_hash:
        found = find_shared_images(
            run.sources.test,
            run.sources.train,
            pixel_hash,
            sample_rows=settings.shared_images_rows,
            say=run.progress.stage,
        )
    run.progress.print(str(found))
    if found.shared and settings.shared_images == "forbid":
        raise TrainError(
            f"{found.shared} test images are also in the training split, so the accuracy is not a held-out one; split "
            "the rows by image, or set evaluate.shared_images=count"
        )
    return found
