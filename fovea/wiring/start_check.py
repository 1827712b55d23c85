"""Builder of the start check of `model.family=auto`, which loads the model once more, and frees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.data.images import ImageOpener
from fovea.environments.base import Environment
from fovea.errors import DataError, ModelError
from fovea.metrics.progress import Progress
from fovea.models.families.auto import layout_of
from fovea.models.modules import config_of
from fovea.models.plain import PlainVLM
from fovea.models.processor import Processor
from fovea.models.render import Renderer, images_of
from fovea.run.parity_faults import without_images
from fovea.train.start_check import Reference, Row, StartCheck
from fovea.types import Task
from fovea.wiring.model import open_vlm

ROWS_TRIED = 64
"""Training rows among which rows with several images, one and none are looked for."""


def compare_with_transformers(
    config: Config,
    model: Model,
    processor: Processor,
    renderer: Renderer,
    opener: ImageOpener,
    environment: Environment,
    progress: Progress,
) -> None:
    """Run the check on training rows, and print its result; ModelError where the model fails it."""
    progress.stage("comparing the model with transformers")
    rows = list(_rows(environment.tasks("train"), environment, renderer))
    if not any(map(images_of, rows)):
        raise ModelError(
            f"model.family=auto: none of the first {ROWS_TRIED} training rows has a picture that can be used, and "
            "without one the model cannot be compared with transformers; correct the rows"
        )
    vlm = open_vlm(config, model, processor.banned_ids)
    assert isinstance(vlm, PlainVLM), "a model without a family has no fast path"
    reference = Reference(
        network=vlm.network, processor=processor.image_processor, arguments=layout_of(config_of(vlm.network)).arguments
    )
    largest = StartCheck(vlm.eval(), processor, renderer, opener, reference).run(rows)
    progress.print(
        f"model.family=auto: ids, tensors and log-probs of {len(rows)} rows equal those of transformers' processor and "
        f"forward (largest difference of a log-prob {largest:.1g})"
    )


def _rows(tasks: Sequence[Task], environment: Environment, renderer: Renderer) -> Iterator[Row]:
    """The first usable row with each number of images up to two, and the first one also without its images."""
    found = set[int]()
    for index in range(min(len(tasks), ROWS_TRIED)):
        try:
            row = environment.prompt(tasks[index])
            renderer.prompt(row)
        except DataError:
            continue  # the run reports it when its data order comes to it
        for each in (row, *([] if found else [without_images(row)])):
            if (count := min(len(images_of(each)), 2)) not in found:
                found.add(count)
                yield each
