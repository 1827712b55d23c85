"""Controls of an accuracy, and the count of images on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from fovea.data.prompt_source import PromptSource
from fovea.evaluation.controls import (
    image_controls,
    pictured_tasks,
    usable_tasks,
    with_blank_images,
    with_shuffled_images,
)
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.models.render import Renderer
from fovea.types import Completion, Request, Sampling
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.examples.games.board import solution
from fovea_gym.examples.games.drawing import draw
from fovea_gym.examples.games.environment import BoardGame, FrozenLakeEnvironment
from fovea_gym.examples.games.frozen_lake import FrozenLake
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef, Message, Task
from fovea_gym.utils.event_loop import wait_for
from tests.environments.prompt_sources import opener, source_of
from tests.fakes import BanditEngine
from tests.records import completion_of
from tests.tiny_models import renderer, tiny

LIMITS: Any = {"max_prompt_tokens": 1000, "on_bad_row": "error", "cache_gib": 0.0}


def test_shuffled_images_are_those_of_other_tasks_of_the_kind() -> None:
    tasks = list(Shapes(ShapesEnvironment(test_size=40), seed=0).tasks("test"))
    shuffled = sorted(with_shuffled_images(tasks), key=lambda task: int(task.id.split("/")[1]))
    for before, after in zip(tasks, shuffled, strict=True):
        assert (before.question, before.answer) == (after.question, after.answer)
        assert before.images[0] is not after.images[0]
    for kind in {task.kind for task in tasks}:
        owned = {id(task.images[0]) for task in tasks if task.kind == kind}
        assert {id(task.images[0]) for task in shuffled if task.kind == kind} == owned


def test_tasks_with_several_images_swap_with_tasks_that_have_as_many() -> None:
    images = [ImageRef(source=np.full((8, 8, 3), index, dtype=np.uint8)) for index in range(9)]
    counts = [1, 2, 1, 2, 0, 3]
    tasks = [Task(id=str(i), question="q", answer="a", images=tuple(images[i : i + n])) for i, n in enumerate(counts)]
    shuffled = {task.id: len(task.images) for task in with_shuffled_images(tasks)}
    assert shuffled == {"0": 1, "2": 1, "1": 2, "3": 2}, "the others have nobody to swap with"


def test_a_shuffled_image_is_never_the_same_picture() -> None:
    """Rows of a data set often share one."""
    pictures = [ImageRef(source=bytes([value])) for value in (1, 1, 1, 2, 2, 3)]
    tasks = [Task(id=str(i), question="q", answer="a", images=(ref,)) for i, ref in enumerate(pictures)]
    shuffled = with_shuffled_images(tasks)
    assert len(shuffled) == 6
    for task in shuffled:
        assert task.images[0].source != pictures[int(task.id)].source


def test_blank_images_of_large_photos_hold_no_pixels(tmp_path: Path) -> None:
    """Those of all test rows are held at once."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    task = Task(id="0", question="q", answer="a", images=(ImageRef(source=str(tmp_path / "a.png")),))
    open_image = ImageOpener(max_image_mib=1, max_image_megapixels=1)
    (blank,) = with_blank_images([task], open_image)
    source = blank.images[0].source
    assert isinstance(source, np.ndarray)
    assert source.strides == (0, 0, 0)
    assert open_image.size(blank.images[0]) == (40, 30)
    assert open_image(blank.images[0]).getcolors() == [(1200, (128, 128, 128))]


def test_rows_that_cannot_be_read_are_left_out_of_controls() -> None:
    """The second image is a file that is not there."""
    images = [ImageRef(source=np.full((8, 8, 3), 7, dtype=np.uint8)), ImageRef(source="nowhere.png", where="row 1")]
    tasks = [Task(id=str(index), question="q", answer="a", images=(ref,)) for index, ref in enumerate(images)]

    careful_opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)
    renderer = Renderer(tiny("qwen3_vl").processor, careful_opener)
    test = source_of(tasks, renderer)
    assert usable_tasks(test, 2) == tasks[:1]
    assert list(test.bad_rows) == [1]


def test_rows_whose_replies_alone_may_have_pictures_are_counted() -> None:
    settings = FrozenLakeEnvironment(side=3, moves=(2, 4), frozen_share=0.7, max_turns=6, test_size=4)
    environment, said = BoardGame(settings, seed=0), list[str]()
    first, *others = environment.tasks("test")
    tasks = [first, *(replace(task, images=()) for task in others)]
    source = PromptSource(tasks, environment, renderer(tiny("qwen3_vl")), **LIMITS)
    assert pictured_tasks(source, 4, said.append) == [first]
    (line,) = said
    assert line.startswith("image controls: 3 of 4 rows are left out, since their tasks have no `images`")


class BestMoves(BanditEngine):
    """An engine that plays the best move on the board of the last picture, and Left on any other picture."""

    def __init__(self, moves: Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._moves = moves
        self._tokenizer = tokenizer

    async def generate(self, request: Request) -> list[Completion]:
        text = self._moves.get(request.prompt.images[-1].key, "Left")
        ids = self._tokenizer.encode(f"{text}{self._tokenizer.eos_token}", add_special_tokens=False)
        return [completion_of(ids, id=f"{request.id}/0", text=text)]


def best_moves(tasks: Sequence[Task], render: Renderer) -> dict[str, str]:
    """The first move of a shortest way from every cell of these lakes, by the key of the picture."""
    moves: dict[str, str] = {}
    for task in tasks:
        start = FrozenLake.read(str(task.row["map"]).split("\n"))
        for cell in product(range(3), range(3)):
            lake = replace(start, player=cell)
            if way := solution(lake, 8):
                shown = Message(role="user", parts=(ImageRef(source=draw(lake.lines)),))
                moves[render.prompt([shown]).images[0].key] = way[0]
    return moves


def test_controls_of_several_turns_show_no_true_picture_in_any_turn() -> None:
    """A player that solves every board it sees finds few goals when it sees other pictures."""
    settings = FrozenLakeEnvironment(side=3, moves=(2, 4), frozen_share=0.7, max_turns=6, test_size=24)
    environment, parts = BoardGame(settings, seed=0), tiny("qwen3_vl")
    render, tasks = renderer(parts), list(environment.tasks("test"))
    source = PromptSource(tasks, environment, render, **LIMITS)
    player = BestMoves(best_moves(tasks, render), parts.processor.tokenizer)
    answers = EngineAnswers(player, environment, Grading(graders=environment.graders))
    evaluator = Evaluator(answers, greedy=Sampling(max_new_tokens=4, temperature=0), batch_size=16)

    def accuracies() -> list[float]:
        sources = (source, *image_controls(source, tasks, opener))
        return [wait_for(evaluator.evaluate(each)).accuracy for each in sources]

    true, shuffled, blank = accuracies()
    assert true == 1.0
    assert max(shuffled, blank) < 0.4
    assert accuracies() == [true, shuffled, blank]
