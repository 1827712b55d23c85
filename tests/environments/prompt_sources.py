"""Prompt sources of questions, and of tasks with pictures in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import current_thread
from typing import Any, Literal

import numpy as np
from PIL import Image

from fovea.data.bad_rows import BadRows
from fovea.data.prompt_source import PromptSource, RendersPrompts
from fovea.types import Prompt, PromptImage
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import DataError
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef, Message, Task, ToolSpec
from gym_tests.bandit import BanditEnvironment
from tests.fakes import BanditRenderer


class PixelRenderer:
    """Prompts with an image of one mebibyte; a question of "bad" cannot be read."""

    def __init__(self, most_tokens: int | None = None) -> None:
        self.threads: list[str] = []
        """The thread of each prompt."""
        self.most_tokens = most_tokens

    @property
    def rendered(self) -> int:
        return len(self.threads)

    def fewest_tokens(self, _messages: Sequence[Message]) -> int:
        return 0

    def prompt(self, messages: Sequence[Message], where: str = "", tools: Sequence[ToolSpec] = ()) -> Prompt:
        question = str(messages[0].parts[0])
        if question == "bad":
            raise DataError("rows.parquet row 3: no image; drop the row")
        self.threads.append(current_thread().name)
        pixels = np.zeros((1024, 256), dtype=np.float32)
        image = PromptImage(key=question, tensors={"pixels": pixels}, num_tokens=256, grid=(1, 32, 32))
        ids = np.zeros(len(question), dtype=np.int64)
        return Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=(image,))


def make_source(
    questions: Sequence[str],
    *,
    on_bad_row: Literal["error", "skip"] = "skip",
    cache_gib: float = 1.0,
    folder: Path | None = None,
    prefetch_threads: int = 0,
    most_tokens: int | None = None,
    images: Sequence[ImageRef] = (),
) -> tuple[PromptSource, PixelRenderer]:
    """The source and its renderer; `images` belong to each task."""
    tasks = [Task(id=f"row {n}", question=text, answer="a", images=tuple(images)) for n, text in enumerate(questions)]
    renderer, environment = PixelRenderer(most_tokens), BanditEnvironment()
    limits: Any = {"max_prompt_tokens": 10, "on_bad_row": on_bad_row, "cache_gib": cache_gib}
    source = PromptSource(tasks, environment, renderer, **limits, bad_rows=BadRows(folder))
    source.render_ahead(prefetch_threads)
    return source, renderer


def opener(ref: ImageRef) -> Image.Image:
    assert isinstance(ref.source, np.ndarray)
    return Image.fromarray(ref.source)


def source_of(tasks: Sequence[Task], renderer: RendersPrompts | None = None) -> PromptSource:
    limits: Any = {"max_prompt_tokens": 1000, "on_bad_row": "skip", "cache_gib": 0.0}
    return PromptSource(tasks, Shapes(ShapesEnvironment(), seed=0), renderer or BanditRenderer(), **limits)
