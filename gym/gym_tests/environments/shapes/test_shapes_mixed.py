"""Shapes with levels, comparisons of two images and scenes in words; the rows without them stay what they were."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from fovea_gym.environments.base import Split
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.environments.shapes.questions import COMPARISON_ANSWERS, KINDS, comparison, in_words, scene
from fovea_gym.environments.shapes.scenes import COLOURS, SHAPES, Thing
from fovea_gym.rows.tasks import kinds_of, levels_of
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef, Message, Task
from gym_tests.grading import scored

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
MIXED = ShapesEnvironment(
    level=(1, 2, 3), comparison_share=0.3, text_share=0.2, train_size=1200, dev_size=240, test_size=240
)
# SHA-256 of the first 60 rows of every split, ids, texts and pixels, before there were levels, pairs and words. Figures
# of different releases compare only while this holds; a change needs a line in the changelog
DIGESTS = {
    1: "fc125e91592b7954a66a874421a7233e6b8eb718f662fe477d0129250c251746",
    2: "f4b43ed984423bd6f499d685089a1b7af66d66514d118a6ad5bec79ac73dbc34",
    3: "d588787a7bfe6850593099f6e329f3ae6b4b21f0379a21775624b6a64f9f70ee",
}


def pixels(image: ImageRef) -> bytes:
    assert isinstance(image.source, np.ndarray)
    return image.source.tobytes()


@pytest.mark.parametrize("level", DIGESTS)
def test_rows_of_the_default_are_what_they_were(level: int) -> None:
    digest = hashlib.sha256()
    for split in SPLITS:
        tasks = Shapes(ShapesEnvironment(level=level), 0).tasks(split)
        assert levels_of(tasks) is None
        for task in tasks[:60]:
            texts = (task.id, task.question, task.answer, task.kind, task.images[0].where)
            digest.update("\n".join(texts).encode())
            digest.update(pixels(task.images[0]))
    assert digest.hexdigest() == DIGESTS[level]


def test_shares_are_spread_evenly() -> None:
    kinds = kinds_of(Shapes(MIXED, 0).tasks("train"))
    for end in (10, 100, 730, 1200):
        counts = Counter(kinds[:end])
        assert counts["text"] == end * 2 // 10
        assert counts["comparison"] == pytest.approx(end * 0.3, abs=1)
        of_one_image = [counts[kind] for kind in KINDS]
        assert max(of_one_image) - min(of_one_image) <= 1


@pytest.mark.parametrize(("name", "kind"), [("text_share", "text"), ("comparison_share", "comparison")])
def test_a_share_of_one_is_all_rows(name: str, kind: str) -> None:
    tasks = Shapes(ShapesEnvironment.model_validate({name: 1.0, "train_size": 50}), 0).tasks("train")
    assert set(kinds_of(tasks)) == {kind}


@pytest.mark.parametrize("split", SPLITS)
def test_gold_answers_of_all_kinds_score_full_marks(split: Split) -> None:
    environment = Shapes(MIXED, 0)
    num_images = {"comparison": 2, "text": 0}
    for task in environment.tasks(split)[:120]:
        (message,) = environment.prompt(task)
        assert message == Message(role="user", parts=(*task.images, task.question))
        assert len(task.images) == num_images.get(task.kind, 1)
        score = scored(environment.graders, task, environment.target(task), (message,))
        assert (score.reward, score.accuracy, score.parts) == (1.0, 1.0, {"answer": 1.0, "format": 1.0})


def test_answers_and_levels_are_balanced() -> None:
    tasks = Shapes(MIXED, 0).tasks("train")
    levels = levels_of(tasks)
    assert levels is not None
    pairs = Counter(
        (level, task.answer) for level, task in zip(levels, tasks, strict=True) if task.kind == "comparison"
    )
    assert pairs == {(level, answer): 30 for level in "123" for answer in COMPARISON_ANSWERS}
    texts = Counter(level for level, kind in zip(levels, kinds_of(tasks), strict=True) if kind == "text")
    assert texts == {"1": 80, "2": 80, "3": 80}
    counting = Counter(
        (level, task.answer) for level, task in zip(levels, tasks, strict=True) if task.kind == "counting"
    )
    assert max(counting.values()) - min(counting.values()) <= 1
    assert len(counting) == 12


def test_no_image_and_no_text_is_in_two_splits() -> None:
    buckets = {"train": range(2, 10), "dev": range(1, 2), "test": range(1)}
    seen: set[bytes] = set()
    for split in SPLITS:
        for task in Shapes(MIXED, 0).tasks(split)[:240]:
            contents = [pixels(image) for image in task.images] or [task.question.encode()]
            for digest in (hashlib.md5(content, usedforsecurity=False).digest() for content in contents):
                assert digest not in seen, task.id
                assert digest[0] % 10 in buckets[split]
                seen.add(digest)


def shapes_in(things: tuple[Thing, ...]) -> Counter[str]:
    return Counter(f"{thing.shape}s" for thing in things)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_comparisons_have_one_answer(level: int) -> None:
    rng = np.random.default_rng(0)
    for turn in range(1200):
        pair = comparison(turn, level, rng)
        match = re.fullmatch(
            r"(?:Which image has more (\w+), the first or the second|Do both images have the same number of (\w+))\?",
            pair.question,
        )
        assert match
        first, second = (shapes_in(things)[match[1] or match[2]] for things in pair.pictures)
        if match[1]:
            assert pair.answer == {1: "first", -1: "second"}[np.sign(first - second)]
        else:
            assert pair.answer == ("yes" if first == second else "no")
        assert level > 1 or sum(map(len, pair.pictures)) == first + second


def answer_by_reading(text: str) -> str:
    """From the words alone."""
    match = re.fullmatch(r"Card \d{1,4} shows (.*?)\. (.*)\?", text)
    assert match
    things = [thing.split()[1:] for thing in re.split(r", | and ", match[1])]
    assert all(colour in COLOURS and shape in SHAPES for colour, shape in things)
    words = match[2].split()
    if words[0] == "How":
        return str(sum(f"{shape}s" == words[2] for _, shape in things))
    if words[0] == "What":
        (answer,) = {colour for colour, shape in things if shape == words[-1]}
    elif words[0] == "Which":
        (answer,) = {shape for colour, shape in things if words[-1] in ("shown", colour)}
    else:
        answer = "yes" if any(shape == words[-1] for _, shape in things) else "no"
    return answer


@pytest.mark.parametrize("level", [1, 2, 3])
def test_scenes_in_words_say_the_answer(level: int) -> None:
    rng = np.random.default_rng(0)
    for turn in range(800):
        seen = scene(KINDS[turn % 4], turn // 4, level, rng)
        assert answer_by_reading(in_words(seen, rng)) == seen.answer


def test_rows_do_not_depend_on_what_was_made_before() -> None:
    def shown(task: Task) -> tuple[object, ...]:
        return task.id, task.question, task.answer, *map(pixels, task.images)

    one, again = (Shapes(MIXED, 3).tasks("train") for _ in range(2))
    list(one[:20])
    assert [shown(one[index]) for index in (25, 4)] == [shown(again[index]) for index in (25, 4)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": [1, 1]}, "each once"),
        ({"level": []}, "at least 1 item"),
        ({"level": [4]}, "less than or equal to 3"),
        ({"text_share": 0.6, "comparison_share": 0.5}, "sum to more than 1"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ShapesEnvironment.model_validate(settings)
