"""Scenes: reproducible, split by what is seen, balanced, unambiguous, and graded to the letter."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest

from fovea_gym.environments.base import Split
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.environments.shapes.questions import KINDS, scene
from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, Thing, draw, free_spots, grid_spots
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.tasks import kinds_of
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Task
from gym_tests.grading import scored

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
LEVELS = (1, 2, 3)


def shapes(level: int = 1, seed: int = 0, side_px: int = 48) -> Shapes:
    return Shapes(ShapesEnvironment(level=level, image_side_px=side_px), seed)


def pixels(task: Task) -> np.ndarray:
    source = task.images[0].source
    assert isinstance(source, np.ndarray)
    return source


def score_of(task: Task, text: str) -> tuple[float, float, float, float]:
    score = scored(shapes().graders, task, text)
    return score.reward, score.accuracy, score.parts["answer"], score.parts["format"]


def test_anything_but_the_box_is_worth_nothing() -> None:
    task = Task(id="train/0", question="How many circles are there?", answer="3")
    assert score_of(task, " \\boxed{3}\n") == (1, 1, 1, 1)
    assert score_of(task, r"\boxed{2}") == (0, 0, 0, 1)
    assert score_of(task, r"The answer is \boxed{3}") == (0, 0, 1, 0)
    assert score_of(task, r"\boxed{3}\boxed{3}") == (0, 0, 1, 0)
    assert score_of(task, r"\boxed{2}\boxed{3}") == (0, 0, 1, 0)
    assert score_of(task, r"\boxed{ 3 }") == (0, 0, 0, 1)
    assert score_of(task, "3") == (0, 0, 0, 0)
    assert score_of(task, "") == (0, 0, 0, 0)


def test_sizes_ids_and_kinds() -> None:
    environment = Shapes(ShapesEnvironment(train_size=10, dev_size=5, test_size=7), 0)
    assert [len(environment.tasks(split)) for split in SPLITS] == [10, 5, 7]
    tasks = environment.tasks("train")
    assert list(kinds_of(tasks)) == [task.kind for task in tasks] == [KINDS[i % 4] for i in range(10)]
    assert [task.id for task in tasks[8:]] == ["train/8", "train/9"]
    with pytest.raises(IndexError):
        tasks[10]


def image_hash(task: Task) -> str:
    return hashlib.md5(pixels(task).tobytes(), usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("level", LEVELS)
def test_a_scene_depends_on_seed_split_and_index_only(level: int) -> None:
    one, again, other = (shapes(level, seed) for seed in (0, 0, 1))
    for index in (7, 3, 100):
        first, second = one.tasks("train")[index], again.tasks("train")[index]
        np.testing.assert_array_equal(pixels(first), pixels(second))
        assert (first.question, first.answer) == (second.question, second.answer)
        assert image_hash(other.tasks("train")[index]) != image_hash(first)


def test_held_out_scenes_are_the_same_in_every_run() -> None:
    for split in ("dev", "test"):
        hashes = [[image_hash(task) for task in shapes(seed=s).tasks(split)[:20]] for s in (0, 5)]
        assert hashes[0] == hashes[1]


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_balanced(split: Split) -> None:
    counts = Counter((task.kind, task.answer) for task in shapes().tasks(split)[:400])
    expected = {
        "counting": dict.fromkeys("1234", 25),
        "colour": dict.fromkeys(COLOURS, 25),
        "shape": {"circle": 34, "square": 33, "triangle": 33},
        "existence": {"yes": 50, "no": 50},
    }
    assert counts == {(kind, answer): n for kind, answers in expected.items() for answer, n in answers.items()}


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_asked_for_varies(level: int) -> None:
    questions = Counter(task.question for task in shapes(level).tasks("train")[:600])
    for shape in SHAPES:
        for question in (f"How many {shape}s are there?", f"What colour is the {shape}?", f"Is there a {shape}?"):
            assert 25 < questions[question] < 80
    named = {f"Which shape is {colour}?" for colour in COLOURS} if level > 1 else {"Which shape is shown?"}
    assert {question for question in questions if question.startswith("Which")} == named


def answer_by_looking(question: str, things: tuple[Thing, ...]) -> set[str]:
    """All answers that the things allow; one for a question that is not ambiguous."""
    words = question.rstrip("?").split()
    if words[0] == "How":
        return {str(sum(f"{thing.shape}s" == words[2] for thing in things))}
    if words[0] == "What":
        return {thing.colour for thing in things if thing.shape == words[-1]}
    if words[0] == "Which":
        return {thing.shape for thing in things if words[-1] in ("shown", thing.colour)}
    return {"yes" if any(thing.shape == words[-1] for thing in things) else "no"}


@pytest.mark.parametrize("level", LEVELS)
def test_questions_have_one_answer(level: int) -> None:
    rng = np.random.default_rng(0)
    num_things: dict[str, Counter[int]] = {"yes": Counter(), "no": Counter()}
    for row in range(2000):
        seen = scene(KINDS[row % 4], row // 4, level, rng)
        assert answer_by_looking(seen.question, seen.things) == {seen.answer}
        if KINDS[row % 4] == "existence":
            num_things[seen.answer][len(seen.things)] += 1
    # whether something exists cannot be told from how many things there are
    assert num_things["yes"].keys() == num_things["no"].keys()
    assert (max(num_things["yes"]) > 1) == (level > 1)


def brightest_colour(image: np.ndarray) -> str:
    """What colour the most saturated pixels have."""
    values = image.reshape(-1, 3).astype(int)
    red, green, blue = values[np.argsort(values.max(1) - values.min(1))[-40:]].mean(0)
    if blue > max(red, green):
        return "blue"
    return "yellow" if min(red, green) > 100 and abs(red - green) < 90 else "red" if red > green else "green"


@pytest.mark.parametrize("side_px", [48, 96])
def test_the_picture_shows_the_answer(side_px: int) -> None:
    tasks = [task for task in shapes(side_px=side_px).tasks("train")[:200] if task.kind == "colour"]
    for task in tasks:
        assert pixels(task).shape == (side_px, side_px, 3)
        assert pixels(task).dtype == np.uint8
        assert brightest_colour(pixels(task)) == task.answer, task.id
        opened = ImageOpener(max_image_mib=1, max_image_megapixels=1)(task.images[0])
        np.testing.assert_array_equal(np.asarray(opened), pixels(task))


@pytest.mark.parametrize(("shape", "area"), [("circle", np.pi), ("square", 4 * 0.92**2), ("triangle", 2.0)])
def test_shapes_are_drawn_to_size(shape: str, area: float) -> None:
    # anti-aliased cover adds up to the area of the shape: compare a large drawing with its formula
    side_px = 480
    for seed in range(5):
        thing = Thing(shape=shape, colour="yellow")  # type: ignore[arg-type]
        with_shape = draw([thing], side_px, np.random.default_rng(seed), free=True)
        rng = np.random.default_rng(seed)
        radius = rng.uniform(4.5, 10.5) * side_px / 48
        covered = (with_shape[..., 0] > 130).sum()
        assert covered == pytest.approx(area * radius**2, rel=0.02)


def test_objects_are_apart_and_inside() -> None:
    for seed in range(50):
        spots = free_spots(6, np.random.default_rng(seed))
        for spot, other in itertools.combinations(spots, 2):
            assert max(abs(spot.x - other.x), abs(spot.y - other.y)) > spot.radius + other.radius
        assert all(spot.radius < centre < 48 - spot.radius for spot in spots for centre in (spot.x, spot.y))


def test_grid_objects_stay_in_their_cells() -> None:
    for seed in range(50):
        spots = grid_spots(6, np.random.default_rng(seed))
        assert len({(spot.x // 16, spot.y // 16) for spot in spots}) == 6
        for spot in spots:
            assert 5.8 <= spot.radius <= 7.4
            assert max(abs(spot.x % 16 - 8), abs(spot.y % 16 - 8)) + spot.radius <= 8.5
