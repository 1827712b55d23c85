"""Controls of an accuracy, dependence on pictures, and test images that the training split has too."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from fovea.data.pixel_hashes import pixel_hash, pixel_hashes
from fovea.data.prompt_source import PromptSource
from fovea.evaluation import controls
from fovea.evaluation.answer_logprobs import answer_logprobs
from fovea.evaluation.controls import (
    SharedImages,
    find_shared_images,
    image_controls,
    pictured_tasks,
    usable_tasks,
    with_blank_images,
    with_shuffled_images,
)
from fovea.evaluation.dependence import dependence
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.evaluation.records import AnsweredRow
from fovea.models.render import Renderer
from fovea.models.vlm import VLM
from fovea.types import Completion, Request, Sampling
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import DataError
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
from tests.records import completion_of, said
from tests.reference import reference_logprobs
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


def test_a_shuffled_image_is_another_picture_of_a_task_with_as_many() -> None:
    """Rows of a data set often share one."""
    pictures = [ImageRef(source=bytes([value])) for value in (1, 1, 1, 2, 2, 3)]
    tasks = [Task(id=str(i), question="q", answer="a", images=(ref,)) for i, ref in enumerate(pictures)]
    shuffled = with_shuffled_images(tasks)
    assert len(shuffled) == 6
    for task in shuffled:
        assert task.images[0].source != pictures[int(task.id)].source
    # tasks with several images swap with tasks that have as many
    images = [ImageRef(source=np.full((8, 8, 3), index, dtype=np.uint8)) for index in range(9)]
    counts = [1, 2, 1, 2, 0, 3]
    tasks = [Task(id=str(i), question="q", answer="a", images=tuple(images[i : i + n])) for i, n in enumerate(counts)]
    shuffled = {task.id: len(task.images) for task in with_shuffled_images(tasks)}
    assert shuffled == {"0": 1, "2": 1, "1": 2, "3": 2}, "the others have nobody to swap with"


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


def search(
    test: PromptSource,
    train: PromptSource,
    sample_rows: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    open_image: Callable[[ImageRef], Image.Image] = opener,
) -> SharedImages:
    return find_shared_images(test, train, lambda ref: pixel_hash(open_image(ref)), sample_rows=sample_rows, say=say)


def count(test: PromptSource, train: PromptSource) -> int:
    return search(test, train).shared


def grey(number: int, *values: int) -> Task:
    """A task with a picture of one grey value each."""
    pictures = tuple(ImageRef(source=np.full((4, 4, 3), value, dtype=np.uint8)) for value in values)
    return Task(id=str(number), question="q", answer="a", images=pictures)


def test_shared_images_are_found_pixel_for_pixel() -> None:
    test = source_of([grey(0, *values) for values in ((1,), (2,), (3, 4), ())])
    for train, shared in (([(9,), (4, 8)], 1), ([(1, 2), (3,)], 3), ([(5,)], 0)):
        assert count(test, source_of([grey(0, *values) for values in train])) == shared
    # an image of another shape is another image
    wide, tall = (ImageRef(source=np.zeros(shape, dtype=np.uint8)) for shape in ((2, 8, 3), (8, 2, 3)))
    tasks = [Task(id="0", question="q", answer="a", images=(ref,)) for ref in (wide, tall)]
    assert count(source_of(tasks[:1]), source_of(tasks[1:])) == 0


def test_a_sample_says_its_share_and_looks_at_nothing_else() -> None:
    class Counted(list[Task]):
        read = 0

        def __getitem__(self, index: int) -> Task:  # type: ignore[override]
            self.read += 1
            return super().__getitem__(index)

    train = Counted(grey(number, number) for number in range(200))
    test = [grey(number, number) for number in range(50)]
    said: list[str] = []
    found = search(source_of(test), source_of(train), 50, said.append)
    assert train.read == 50
    assert 0 < found.shared < 50
    searched = "searched: all 50 test rows, 50 of 200 (25 %) training rows"
    assert str(found) == f"{found.shared} test rows have an image that a training row has too ({searched})"
    assert said[0] == "looking for test images in the training split: 0 of 50 test rows"
    assert "looking for test images in the training split: 16 of 50 training rows" in said
    assert search(source_of(test), source_of(train), 50) == found, "the same sample every time"
    assert search(source_of(test), source_of(train)).shared == 50


def test_slow_images_cut_a_sample_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and says nothing: each of 100 rows would take .2 s."""
    monkeypatch.setattr(controls, "MAX_SAMPLE_SECONDS", 1.0)

    def wait_for_it(ref: ImageRef) -> bytes:
        with socket.create_connection(silent.getsockname()) as connection:
            connection.settimeout(0.2)
            try:
                return connection.recv(1)
            except TimeoutError:
                raise DataError("the server says nothing") from None

    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        tasks = [grey(number, number) for number in range(100)]
        started = time.monotonic()
        found = find_shared_images(source_of(tasks), source_of(tasks), wait_for_it, sample_rows=99, say=lambda _: None)
        assert time.monotonic() - started < 10
        assert found.train.rows < 99
        assert found.shared == 0


def test_bad_rows_are_left_for_the_run_to_find() -> None:
    tasks = [grey(0, 7), Task(id="1", question="q", answer="a", images=(ImageRef(source="nowhere.png"),))]
    source, careful = source_of(tasks), ImageOpener(max_image_mib=1, max_image_megapixels=1)
    assert search(source, source_of(tasks), open_image=careful).shared == 1
    assert not source.bad_rows


def hashes(folder: Path, refs: Sequence[ImageRef], salt: str = "") -> tuple[list[bytes], int]:
    """The hashes of pictures, and how many of these were opened for them."""
    opened: list[object] = []
    plain = ImageOpener(max_image_mib=1, max_image_megapixels=1)

    def noted(ref: ImageRef) -> Image.Image:
        opened.append(ref.source)
        return plain(ref)

    with pixel_hashes(folder, noted, salt) as of:
        return [of(ref) for ref in refs], len(opened)


def test_hashes_are_kept_between_runs_by_content(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    refs = [ImageRef(source=file.read_bytes()), ImageRef(source=str(file))]
    first, opened = hashes(cache, refs)
    assert (first[0], opened) == (first[1], 2)
    assert hashes(cache, [*refs, ImageRef(source=file.read_bytes(), where="elsewhere")]) == ([*first, first[0]], 0)
    assert hashes(cache, refs, "rotated")[1] == 2, "opened otherwise, other pixels"
    Image.new("RGB", (9, 9), "blue").save(file)
    changed, opened = hashes(cache, [ImageRef(source=str(file))])
    assert (changed[0] != first[0], opened) == (True, 1)
    # a cache that is no database
    (tmp_path / "pixel_hashes.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"pixel_hashes\.sqlite cannot be used .* delete it, or set data\.cache_dir"):
        hashes(tmp_path, [ImageRef(source=b"x")])


def test_shapes_share_no_image_across_splits() -> None:
    environment = Shapes(ShapesEnvironment(train_size=400, dev_size=100, test_size=200), seed=3)
    train, dev, test = (source_of(environment.tasks(split)) for split in ("train", "dev", "test"))
    assert count(test, train) == count(test, dev) == 0
    assert count(dev, train) == 0


ROWS = 8
TEMPERATURE = 0.7


def answered(index: int, tokens: tuple[int, ...]) -> AnsweredRow:
    return AnsweredRow(id=f"test/{index}", index=index, kind="all", answers=(said("said"),), token_ids=tokens)


@pytest.mark.parametrize("row_tokens", [16_384, 100, 1])
def test_dependence_is_that_of_transformers(row_tokens: int) -> None:
    parts = tiny("qwen3_vl")
    source = source_of(Shapes(ShapesEnvironment(test_size=ROWS), seed=0).tasks("test"), renderer(parts))
    # of different lengths; the last row has none, as that of a server
    rows = {f"test/{index}": answered(index, tuple(range(5, 5 + index))[::-1]) for index in range(1, ROWS)}
    rows["test/0"] = answered(0, ())
    vlm = VLM(parts.network, parts.processor.banned_ids)
    scores = partial(answer_logprobs, vlm, max_tokens=row_tokens, temperature=TEMPERATURE)
    others = image_controls(source, list(source.tasks), opener)
    for other, found in zip(others, dependence(source, others, rows, scores), strict=True):
        assert set(found) == set(rows) - {"test/0"}
        for task in other.tasks:
            if task.id == "test/0":
                continue
            answer_T = np.array(rows[task.id].token_ids)
            prompts = (source.get(rows[task.id].index), other.render(task))
            true, changed = (
                float(reference_logprobs(parts, item.prompt, answer_T, TEMPERATURE).sum().detach())
                for item in prompts
                if item is not None
            )
            assert found[task.id] == pytest.approx((true - changed) / len(answer_T), abs=1e-4)
        assert max(map(abs, found.values())) > 1e-3, "a tiny model reads its picture"
